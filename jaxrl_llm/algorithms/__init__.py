"""The catalogue: one short function per published method, each returning an `Algorithm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms import (
    actor_critic,
    critic_free,
    entropy_credit,
    exploration,
    group_relative,
    guided,
    mismatch,
    multi_reward,
    preference,
    regression,
    regularised,
    score_function,
    selection,
    sequence_level,
    sets,
    shaped_reward,
    token_credit,
    trust_region,
    weighted,
)
from jaxrl_llm.algorithms.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.algorithms.ranges import checked
from jaxrl_llm.errors import InputError, shown, unknown

FAMILIES = (
    actor_critic,
    critic_free,
    entropy_credit,
    exploration,
    group_relative,
    guided,
    mismatch,
    multi_reward,
    preference,
    regression,
    regularised,
    score_function,
    selection,
    sequence_level,
    sets,
    shaped_reward,
    token_credit,
    trust_region,
    weighted,
)
CATALOGUE: dict[str, Callable[..., Algorithm]] = {
    name: checked(getattr(family, name)) for family in FAMILIES for name in family.__all__
}


def names() -> list[str]:
    """Names of all methods."""
    return sorted(CATALOGUE)


def constructor(name: str) -> Callable[..., Algorithm]:
    """The function that builds a method; InputError, with the nearest name, where there is none of that name."""
    if not isinstance(name, str):
        raise InputError(f"an algorithm is given by its name, but found {shown(name)}: see algorithms.names()")
    if name not in CATALOGUE:
        raise unknown("algorithm", name, CATALOGUE)
    return CATALOGUE[name]


def get(name: str, **hyperparameters: Any) -> Algorithm:
    """A method by its name. InputError for an unknown name or hyper-parameter, and for a value out of range."""
    return constructor(name)(**hyperparameters)


def with_facts(build: Callable[..., Algorithm], given: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """The hyper-parameters that were given, and of the facts of a run those that `build` has and nothing was given for.

    facts: max_length (longest completion, tokens), total_steps (iterations), learning_rate.
    """
    known = inspect.signature(build).parameters
    chosen = {name: value for name, value in given.items() if value is not None}
    return {**{name: value for name, value in facts.items() if name in known}, **chosen}


def __getattr__(name: str) -> Callable[..., Algorithm]:
    if name in CATALOGUE:
        return CATALOGUE[name]
    raise AttributeError(f"{__name__} has no attribute {name!r}")


__all__ = ["CATALOGUE", "Algorithm", "DynamicSampling", "constructor", "get", "names", "with_facts"]
