"""An outer loop around an optimiser: after each round of updates the parameters move on from where the round led.

A round begins at x and ends at y, where the run's optimiser has taken it. An `OuterLoop` says at which parameters the
next one begins. Its state, two more copies of the parameters that learn, is part of the optimiser's, so that it is in
every checkpoint and sharded as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core.annotations import Count, Number, PositiveNumber, Range
from jaxrl_llm.core.repr import layout, part

Params = Any
Momentum = Annotated[Number, Range(least=0, below=1)]
Move = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, repr=False)
class OuterLoop:
    """How the next round begins.

    begin: the initial parameters -> memory of the same shapes. move: (x, y, memory, rounds before this one int32[]) ->
    (the next x, memory), of each array alone. every: updates of a round, each of all the gradient steps on a batch.
    """

    begin: Callable[[jax.Array], jax.Array]
    move: Move
    every: int = 1

    def around(self, optimizer: optax.GradientTransformation, steps: int) -> optax.GradientTransformation:
        """The optimiser with the outer loop. steps: gradient steps of an update."""
        every = self.every * steps

        def init(params: Params) -> OuterState:
            start = jax.tree.map(jnp.copy, params)
            memory = jax.tree.map(lambda x: jnp.copy(self.begin(x)), params)
            return OuterState(optimizer.init(params), jnp.zeros((), jnp.int32), start, memory)

        def update(grads: Params, state: OuterState, params: Params | None = None) -> tuple[Params, OuterState]:
            inner, own = optimizer.update(grads, state.inner, params)
            steps = state.steps + 1
            over = steps % every == 0

            def moved(x: jax.Array, now: jax.Array, step: jax.Array, memory: jax.Array) -> tuple[jax.Array, ...]:
                y = now + step.astype(now.dtype)
                after, kept = self.move(x, y, memory, state.steps // every)
                own_step = jnp.where(over, (after - now).astype(step.dtype), step)
                return own_step, jnp.where(over, after, x), jnp.where(over, kept, memory)

            found = jax.tree.map(moved, state.start, params, inner, state.memory)
            changes, start, memory = jax.tree.transpose(
                jax.tree.structure(params), jax.tree.structure((0, 0, 0)), found
            )
            return changes, OuterState(own, steps, start, memory)

        return optax.GradientTransformation(init, update)

    __repr__ = layout


class OuterState(NamedTuple):
    """The state of an optimiser in an outer loop."""

    inner: Any  # of the optimiser
    steps: jax.Array  # int32[], taken so far
    start: Params  # where the round began
    memory: Params


@part
def extrapolated(momentum: Momentum = 0.3, every: Count = 1) -> OuterLoop:
    """y + momentum (y - the end of the round before): Nesterov's extrapolation of the iterates."""

    def move(x: jax.Array, y: jax.Array, last: jax.Array, rounds: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (y + momentum * (y - last)).astype(y.dtype), y

    return OuterLoop(lambda x: x, move, every)


@part
def outer_step(
    scale: PositiveNumber = 1.0,
    momentum: Momentum = 0.0,
    every: Count = 1,
    smaller_from: Count | None = None,
    factor: PositiveNumber = 5.0,
) -> OuterLoop:
    """x + scale v, v the sum of all rounds' y - x, each of which counts momentum times as much a round later.

    scale 1 without momentum is the run without an outer loop; a smaller scale averages where rounds begin and end.
    smaller_from: the round, from 0, from which on the scale is divided by `factor`.
    """

    def move(x: jax.Array, y: jax.Array, sums: jax.Array, rounds: jax.Array) -> tuple[jax.Array, jax.Array]:
        velocity = momentum * sums + (y - x)
        size = scale if smaller_from is None else jnp.where(rounds < smaller_from, scale, scale / factor)
        return (x + size * velocity).astype(x.dtype), velocity

    return OuterLoop(jnp.zeros_like, move, every)
