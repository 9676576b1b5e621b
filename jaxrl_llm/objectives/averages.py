"""Averages: from values of tokens to a number, the same however the batch is split, padded or ordered.

Each is a sum over the rows at hand divided by a total of the whole batch (`trajectory.totals_of`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.trajectory import Trajectories, totals_of

Average = Callable[[jax.Array, Trajectories], jax.Array]  # (values f32[N, L], batch) -> f32[]


def _weighted(values: jax.Array, batch: Trajectories) -> tuple[jax.Array, jax.Array]:
    """Values without what is masked (which may be anything, even NaN), and the weights."""
    weights = batch.loss_weights
    return jnp.where(weights != 0, values, 0.0) * weights, weights


def token_mean() -> Average:
    """Sum over all tokens / number of tokens in the batch: every token counts the same (DAPO)."""

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        weighted, _ = _weighted(values, batch)
        return jnp.sum(weighted) / totals_of(batch)["tokens"]

    return average


def sequence_mean() -> Average:
    """Mean over sequences of the mean over their tokens: every sequence counts the same (GRPO)."""

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        weighted, weights = _weighted(values, batch)
        length = jnp.sum(weights, axis=1)
        means = jnp.sum(weighted, axis=1) / jnp.where(length > 0, length, 1.0)
        return jnp.sum(means) / totals_of(batch)["sequences"]

    return average
