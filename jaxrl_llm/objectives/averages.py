"""Averages: from values of tokens to a number, the same however the batch is split, padded or ordered.

Each is a sum over the rows at hand divided by a total of the whole batch (`trajectory.totals_of`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import require
from jaxrl_llm.trajectory import Trajectories, totals_of

Average = Callable[[jax.Array, Trajectories], jax.Array]  # (values f32[N, L], batch) -> f32[]


def weighted(values: jax.Array, batch: Trajectories) -> jax.Array:
    """Values times loss weights, f32[N, L]; what is masked may be anything, even NaN."""
    weights = batch.loss_weights
    return jnp.where(weights != 0, values, 0.0) * weights


def row_means(values: jax.Array, batch: Trajectories) -> jax.Array:
    """Mean of each row over its weighted tokens, f32[N]; 0 where there are none."""
    length = jnp.sum(batch.loss_weights, axis=1)
    return jnp.sum(weighted(values, batch), axis=1) / jnp.where(length > 0, length, 1.0)


def token_mean() -> Average:
    """Sum over all tokens / number of tokens in the batch: every token counts the same (DAPO)."""
    return lambda values, batch: jnp.sum(weighted(values, batch)) / totals_of(batch)["tokens"]


def sequence_mean() -> Average:
    """Mean over sequences of the mean over their tokens: every sequence counts the same (GRPO)."""
    return lambda values, batch: jnp.sum(row_means(values, batch)) / totals_of(batch)["sequences"]


def sequence_sum() -> Average:
    """Mean over sequences of the sum over their tokens: the gradient of the sequence's log-probability (REINFORCE)."""
    return lambda values, batch: jnp.sum(weighted(values, batch)) / totals_of(batch)["sequences"]


def constant(length: float) -> Average:
    """Sum over all tokens / (sequences * length), length a constant: no bias by length (Dr. GRPO, 2503.20783).

    Every sequence with an action counts, also one whose tokens were dropped. length > 0, or InputError.
    """
    require("length", length, above=0)
    return lambda values, batch: jnp.sum(weighted(values, batch)) / (totals_of(batch)["rows"] * length)


def slice_token_mean() -> Average:
    """Mean over the tokens of the slice at hand, weighted by its share of the sequences (TRL's "bnpo").

    The one average that does depend on how the batch is split into micro-batches; for comparisons only.
    """

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        here = totals_of(batch.replace(totals=None))
        share = here["sequences"] / totals_of(batch)["sequences"]
        return share * jnp.sum(weighted(values, batch)) / here["tokens"]

    return average
