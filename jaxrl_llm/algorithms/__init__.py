"""The catalogue: one short function per published method, each returning an `Algorithm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.grpo import grpo
from jaxrl_llm.errors import unknown

CATALOGUE: dict[str, Callable[..., Algorithm]] = {"grpo": grpo}


def names() -> list[str]:
    """Names of all methods."""
    return sorted(CATALOGUE)


def constructor(name: str) -> Callable[..., Algorithm]:
    """The function that builds a method; InputError, with the nearest name, where there is none of that name."""
    if name not in CATALOGUE:
        raise unknown("algorithm", name, CATALOGUE)
    return CATALOGUE[name]


def get(name: str, **hyperparameters: Any) -> Algorithm:
    """A method by its name. InputError for an unknown name or hyper-parameter."""
    build = constructor(name)
    known = inspect.signature(build).parameters
    for given in hyperparameters:
        if given not in known:
            raise unknown(f"hyper-parameter of {name}", given, known)
    return build(**hyperparameters)


__all__ = ["CATALOGUE", "Algorithm", "constructor", "get", "grpo", "names"]
