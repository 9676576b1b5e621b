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
    long_reasoning,
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
    tempered,
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
    long_reasoning,
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
    tempered,
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
    """The function that builds a method; InputError, with the nearest name, for an unknown name."""
    if not isinstance(name, str):
        raise InputError(f"an algorithm is given by its name, but found {shown(name)}: see algorithms.names()")
    if name not in CATALOGUE:
        raise unknown("algorithm", name, CATALOGUE)
    return CATALOGUE[name]


def get(name: str, **hyperparameters: Any) -> Algorithm:
    """Build a method by name. InputError for an unknown name or hyper-parameter, and for a value out of range."""
    return constructor(name)(**hyperparameters)


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


__all__ = ["CATALOGUE", "Algorithm", "DynamicSampling", "constructor", "get", "names", "with_facts"]
