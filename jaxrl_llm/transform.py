"""The glue: stateful preparation (`Transform`) and stateless losses (`Objective`), both closed under composition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.trajectory import PolicyOutputs, Trajectories

State = Any
Metrics = dict[str, jax.Array]


class Transform(NamedTuple):
    """A pair of pure functions, as in optax. `apply` fills in fields of the batch; all memory is in the state.

    init:  () -> state, a pytree
    apply: (state, batch) -> (state, batch)
    """

    init: Callable[[], State]
    apply: Callable[[State, Trajectories], tuple[State, Trajectories]]


def stateless(f: Callable[[Trajectories], Trajectories]) -> Transform:
    """The transform that applies `f` and remembers nothing."""
    return Transform(init=lambda: (), apply=lambda state, batch: (state, f(batch)))


def chain(*transforms: Transform) -> Transform:
    """Apply transforms from left to right; itself a Transform whose state is the tuple of theirs."""

    def init() -> State:
        return tuple(t.init() for t in transforms)

    def apply(state: State, batch: Trajectories) -> tuple[State, Trajectories]:
        after = []
        for transform, before in zip(transforms, state, strict=True):
            new, batch = transform.apply(before, batch)
            after.append(new)
        return tuple(after), batch

    return Transform(init, apply)


@dataclass(frozen=True)
class Objective:
    """A loss to minimise: `(outputs, batch) -> (loss, metrics)`, pure and stateless.

    Objectives add, and scale by a number. Loss and metrics are sums over the rows of the batch divided by
    `totals_of(batch)`, so those of micro-batches add up to those of the whole batch.
    """

    function: Callable[[PolicyOutputs, Trajectories], tuple[jax.Array, Metrics]]
    needs: frozenset[str] = frozenset()  # names of batch fields that the loop must provide, e.g. "reference_logp"

    def __call__(self, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        return self.function(outputs, batch)

    def __add__(self, other: Objective) -> Objective:
        def total(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
            loss_a, metrics_a = self(outputs, batch)
            loss_b, metrics_b = other(outputs, batch)
            return loss_a + loss_b, {**metrics_a, **metrics_b}

        return Objective(total, self.needs | other.needs)

    def __mul__(self, scale: float | jax.Array) -> Objective:
        def scaled(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
            loss, metrics = self(outputs, batch)
            return jnp.asarray(scale) * loss, metrics

        return Objective(scaled, self.needs)

    __rmul__ = __mul__

    def __sub__(self, other: Objective) -> Objective:
        return self + (-1.0) * other
