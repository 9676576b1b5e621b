"""Embeddings of whole texts: means of a model's last hidden states."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.models.policy import Params, Policy, positions_of


def pooled_states(policy: Policy, params: Params, tokens: jax.Array, mask: jax.Array, pieces: int = 1) -> jax.Array:
    """f32[N, pieces, D]: the means of the last hidden states over as many equal parts of each row's tokens.

    tokens int32[N, L]; mask bool[N, L] is true on real tokens. Of T tokens, piece s has those from floor(s T / pieces)
    up to ceil((s + 1) T / pieces), so that pieces of short rows share tokens and none is empty. A row without a token
    is 0.
    """
    real = mask.astype(jnp.int32)
    hidden, _ = policy.forward(params, tokens, positions_of(real), real)
    count, number = jnp.sum(real, axis=1)[:, None, None], jnp.arange(pieces)[None, :, None]
    place = positions_of(real)[:, None, :]
    inside = (place >= number * count // pieces) & (place < -(-(number + 1) * count // pieces)) & (real > 0)[:, None, :]
    share = inside / jnp.maximum(jnp.sum(inside, axis=2, keepdims=True), 1)
    states = jnp.where(real[:, :, None] > 0, hidden.astype(jnp.float32), 0.0)
    return jnp.einsum("nsl,nld->nsd", share, states, precision=jax.lax.Precision.HIGHEST)
