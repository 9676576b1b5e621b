"""Hints that are trained on: the first actions of a row, which the policy did not sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories


def hint_tokens(batch: Trajectories) -> jax.Array:
    """bool[N, L]: the first info["hint_tokens"] f32[N] actions of each row; none without the entry."""
    number = (batch.info or {}).get("hint_tokens")
    if number is None:
        return jnp.zeros(batch.action_mask.shape, bool)
    return batch.action_mask & (batch.action_index < jnp.nan_to_num(number)[:, None])
