"""Weights of terms of a loss: numbers, controls, and functions of the batch (`Coefficient`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.repr import layout
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.utils.errors import InputError

Refresh = Callable[[PolicyOutputs, Trajectories], Trajectories]


def in_turn(*refreshes: Refresh | None) -> Refresh | None:
    """Compose refreshes from left to right, dropping duplicates and Nones; None if nothing is left."""
    there = list(dict.fromkeys(one for one in refreshes if one is not None))
    if len(there) < 2:
        return there[0] if there else None

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        return functools.reduce(lambda b, one: one(outputs, b), there, batch)

    return refresh


@dataclass(frozen=True, repr=False)
class Coefficient:
    """The weight of a term that depends on the batch: `function: batch -> f32[]`, e.g. of `batch.controls`.

    Like ratios and averages it has `needs`, and a `refresh` that computes what depends on the whole batch.
    """

    function: Callable[[Trajectories], jax.Array]
    needs: frozenset[str] = frozenset()
    refresh: Refresh | None = None

    def __call__(self, batch: Trajectories) -> jax.Array:
        return self.function(batch)

    __repr__ = layout


Scale = float | jax.Array | str | Callable[[Trajectories], jax.Array]  # a Coefficient is such a callable


def coefficient(scale: Scale) -> Coefficient:
    """A number, the name of a control, or a function of the batch as a `Coefficient`; InputError for anything else."""
    if isinstance(scale, Coefficient):
        return scale
    if isinstance(scale, str):
        return Coefficient(lambda batch: control(batch, scale))
    if callable(scale):
        require_function("the scale of an objective", scale)
        return Coefficient(scale)
    check_number("the scale of an objective", scale)
    return Coefficient(lambda batch: jnp.asarray(scale))


def control(batch: Trajectories, name: str) -> jax.Array:
    """A number that a controller wrote; InputError if none did."""
    if name not in (batch.controls or {}):
        raise InputError(f"no transform wrote the control {name!r}: chain its controller before the objective")
    return (batch.controls or {})[name]
