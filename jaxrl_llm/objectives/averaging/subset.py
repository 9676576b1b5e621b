"""Means over the tokens of selected rows, whose number must be counted over the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.parts import Trajectories, control, part, stateless_part, weighted
from jaxrl_llm.objectives.averaging.averages import Average


@stateless_part()
def count_tokens(batch: Trajectories, rows: Callable[[Trajectories], jax.Array], name: str) -> Trajectories:
    """Write the control `name`: the sum of the token weights, times rows(batch) f32[N].

    Chain it after transforms that change the weights.
    """
    return batch.with_controls(**{name: jnp.sum(rows(batch)[:, None] * batch.loss_weights)})


@part
def mean_by(name: str) -> Average:
    """Sum over all tokens / the control `name`; 0 if that is 0. Values must be 0 on tokens that it does not count."""

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        count = control(batch, name)
        return jnp.where(count > 0, jnp.sum(weighted(values, batch)) / jnp.where(count > 0, count, 1.0), 0.0)

    return Average(average)
