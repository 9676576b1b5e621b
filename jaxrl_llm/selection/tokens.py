"""Which tokens to train on: the top share of a row or the batch by score, or the end of each row. Masks bool[N, L]."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.utils.errors import require_choice

SCOPES = ("row", "batch")


def share_up(count: jax.Array, share: jax.Array | float) -> jax.Array:
    """ceil(count * share), robust to float32 rounding of the product."""
    return jnp.ceil(count * share - 1e-4 - 2e-7 * count)


def share_down(count: jax.Array, share: jax.Array | float) -> jax.Array:
    """floor(count * share), robust to float32 rounding of the product."""
    return jnp.floor(count * share + 1e-4 + 2e-7 * count)


def top_tokens(
    score: jax.Array, mask: jax.Array, share: jax.Array | float, ties: jax.Array, scope: Literal["row", "batch"]
) -> jax.Array:
    """The ceil(share * n) of the n masked tokens of each row, or of the batch, with the highest scores f32[N, L].

    Ties go to the smaller `ties` f32[N, L]. share may be one number per row, f32[N, 1].

    >>> score = jnp.array([[0.15, 1.8, 0.6], [1.0, 0.15, 0.3]])
    >>> print(top_tokens(score, score > 0, 0.5, -score, "batch").astype(int))
    [[0 1 1]
     [1 0 0]]
    """
    require_choice("scope", scope, SCOPES)
    shape = score.shape
    if scope == "batch":
        score, mask, ties = (x.reshape(1, -1) for x in (score, mask, ties))
    order = jnp.lexsort((ties, jnp.where(mask, -score, 0.0), ~mask), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    count = jnp.sum(mask, axis=1, keepdims=True)
    return (mask & (rank < share_up(count, share))).reshape(shape)


def late_tokens(action_index: jax.Array, lengths: jax.Array, skip: jax.Array | float) -> jax.Array:
    """The actions of each row except the first min(floor(skip * T), T - 1), T = lengths f32[N]."""
    first = jnp.minimum(share_down(lengths, skip), lengths - 1)
    return (action_index >= 0) & (action_index >= first[:, None])
