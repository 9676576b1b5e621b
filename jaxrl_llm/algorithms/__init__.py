"""The catalogue: one short function per published method, each returning an `Algorithm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms import (
    actor_critic,
    agent_retries,
    agent_trees,
    covariance,
    critic_free,
    curricula,
    entropy_credit,
    exploration,
    group_relative,
    guided,
    hint_tokens,
    hinted,
    long_reasoning,
    masked,
    mismatch,
    moving_reference,
    multi_reward,
    of_screens,
    preference,
    prefixed,
    regression,
    regularised,
    replayed,
    reward_composed,
    score_function,
    selection,
    self_distilled,
    sequence_level,
    sets,
    shaped_reward,
    supervised,
    swapped,
    tempered,
    token_credit,
    trees,
    trust_region,
    turn_chunks,
    turn_credit,
    turn_information,
    turn_models,
    turn_planned,
    turn_rows,
    turn_shaped,
    turn_values,
    two_policies,
    weighted,
)
from jaxrl_llm.algorithms.given import Build, Given, builder, from_file
from jaxrl_llm.algorithms.ranges import checked
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.signatures import is_in_file, unknown_method
from jaxrl_llm.utils.errors import InputError, shown

FAMILIES = (
    actor_critic,
    agent_retries,
    agent_trees,
    covariance,
    critic_free,
    curricula,
    entropy_credit,
    exploration,
    group_relative,
    guided,
    hint_tokens,
    hinted,
    long_reasoning,
    masked,
    mismatch,
    moving_reference,
    multi_reward,
    of_screens,
    preference,
    prefixed,
    regression,
    regularised,
    replayed,
    reward_composed,
    score_function,
    selection,
    self_distilled,
    sequence_level,
    sets,
    shaped_reward,
    supervised,
    swapped,
    tempered,
    token_credit,
    trees,
    trust_region,
    turn_credit,
    turn_information,
    turn_chunks,
    turn_models,
    turn_planned,
    turn_rows,
    turn_shaped,
    turn_values,
    two_policies,
    weighted,
)
CATALOGUE: dict[str, Callable[..., Algorithm]] = {
    name: checked(getattr(family, name)) for family in FAMILIES for name in family.__all__
}


def names() -> list[str]:
    """Names of all methods."""
    return sorted(CATALOGUE)


def constructor(name: str) -> Build:
    """The function that builds a method of the catalogue, or of a file: path/to/file.py:NAME, package.module:NAME.

    Raises InputError, with the nearest name, for an unknown name, and for a file that cannot be loaded.
    """
    if not isinstance(name, str):
        raise InputError(f"an algorithm is given by its name, but found {shown(name)}: see algorithms.names()")
    if is_in_file(name):
        return from_file(name)[0]
    if name not in CATALOGUE:
        raise unknown_method(name, CATALOGUE)
    return CATALOGUE[name]


def get(name: str, **hyperparameters: Any) -> Algorithm:
    """Build a method by name. InputError for an unknown name or hyper-parameter, and for a value out of range."""
    return constructor(name)(**hyperparameters)


def build_of(algorithm: Given) -> Build:
    """The function of hyper-parameters that builds what is given: a name, an Algorithm, or a function that makes one.

    Raises InputError for anything else, and as `constructor` and `given.builder` do.
    """
    return constructor(algorithm) if isinstance(algorithm, str) else builder(algorithm)


def with_facts(build: Callable[..., Algorithm], given: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """The given hyper-parameters, completed by those facts of the run that are parameters of `build` and not given.

    facts: max_length (longest completion, tokens), total_steps (iterations), learning_rate.
    """
    known = inspect.signature(build).parameters
    chosen = {name: value for name, value in given.items() if value is not None}
    return {**{name: value for name, value in facts.items() if name in known}, **chosen}


def __getattr__(name: str) -> Callable[..., Algorithm]:
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise AttributeError(f"{__name__} has no attribute {name!r}")


__all__ = [
    "CATALOGUE", "Algorithm", "Build", "DynamicSampling", "Given", "build_of", "constructor", "get", "names",
    "with_facts",
]  # fmt: skip
