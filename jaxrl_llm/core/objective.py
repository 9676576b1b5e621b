"""Losses that can be added and scaled: `Objective`, a function of outputs and batch, and the weights of its terms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.checks import expect, names_of, require_function
from jaxrl_llm.core.arguments.ranges import check_divisor, check_number
from jaxrl_llm.core.loss_metrics import Metrics, merge_metrics
from jaxrl_llm.core.repr import Negation, Operation, layout, recorded
from jaxrl_llm.core.shapes import check_outputs
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.utils.errors import InputError, is_off

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


@dataclass(frozen=True, repr=False)
class Objective:
    """A loss to minimise: `(outputs, batch) -> (loss, metrics)`, pure and stateless.

    Objectives can be added (also by `sum`), subtracted and negated, divided by a number, and scaled by a number, the
    name of a control, or a function of the batch (`Coefficient`). If two terms of a sum report a metric of the same
    name, the second's is called "NAME/2", the third's "NAME/3". Loss and metrics are sums over the rows of the batch
    divided by `totals_of(batch)`, so those of micro-batches add up to those of the whole batch.

    Quantities that depend on the whole batch at the current parameters (a quantile, a covariance, the other members of
    a group) are computed by `refresh`: it gets all rows at once, without gradients, and writes its results into the
    batch before `function` sees a slice of it. Calling the objective does both, in this order. by_groups: a slice that
    holds whole groups can be refreshed by itself, so that no pass over the whole batch comes before.
    """

    function: Callable[[PolicyOutputs, Trajectories], tuple[jax.Array, Metrics]]
    needs: frozenset[str] = frozenset()  # names of what the loop must provide, e.g. "reference_logp"
    refresh: Refresh | None = None
    by_groups: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", names_of(self.needs))

    def __call__(self, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        check_outputs(outputs, batch)
        return self.function(outputs, self.refreshed(outputs, batch))

    def refreshed(self, outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        """The whole batch with the results of `refresh`."""
        return batch if self.refresh is None else self.refresh(jax.lax.stop_gradient(outputs), batch)

    def __add__(self, other: Objective) -> Objective:
        expect("what is added to an objective", other, Objective)
        if _nothing in (self.function, other.function):
            return self if other.function is _nothing else other
        return recorded(self._plus(other), Operation("+", self, other))

    def __radd__(self, other: Any) -> Objective:
        """The 0 that `sum` starts from adds nothing; InputError for anything else."""
        if not is_off(other):
            expect("what an objective is added to", other, Objective)
        return self

    def __sub__(self, other: Objective) -> Objective:
        expect("what is subtracted from an objective", other, Objective)
        if other.function is _nothing:
            return self
        return recorded(self._plus(other._times(-1.0)), Operation("-", self, other))

    def __mul__(self, scale: Scale) -> Objective:
        """Scale the loss, not the metrics. A term with a static scale of 0 is dropped together with its needs."""
        return recorded(self._times(scale), Operation("*", self, scale))

    def __rmul__(self, scale: Scale) -> Objective:
        return recorded(self._times(scale), Operation("*", scale, self))

    def __truediv__(self, divisor: float | jax.Array) -> Objective:
        check_divisor("an objective", divisor)
        return recorded(self._times(1 / divisor), Operation("/", self, divisor))

    def __neg__(self) -> Objective:
        return recorded(self._times(-1.0), Negation(self))

    __repr__ = layout

    def _plus(self, other: Objective) -> Objective:
        def total(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
            loss_a, metrics_a = self.function(outputs, batch)
            loss_b, metrics_b = other.function(outputs, batch)
            return loss_a + loss_b, merge_metrics(metrics_a, metrics_b)

        refresh = in_turn(self.refresh, other.refresh)
        return Objective(total, self.needs | other.needs, refresh, self._by_groups and other._by_groups)

    @property
    def _by_groups(self) -> bool:
        return self.refresh is None or self.by_groups

    def _times(self, scale: Scale) -> Objective:
        if isinstance(scale, Objective):
            check_number("the scale of an objective", scale)
        weight = coefficient(scale)
        if is_off(scale) or self.function is _nothing:
            return Objective(_nothing)

        def scaled(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
            loss, metrics = self.function(outputs, batch)
            return weight(batch) * loss, metrics

        by_groups = self._by_groups and weight.refresh is None
        return Objective(scaled, self.needs | weight.needs, in_turn(self.refresh, weight.refresh), by_groups)


def _nothing(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
    """A term that is statically off; sums leave it out."""
    return jnp.float32(0), {}
