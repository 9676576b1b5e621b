"""Credit by difficulty bins: prompts in bins by how often they were solved, and a weight for each bin."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mixed_shares(weights: jax.Array, uniform: jax.Array | float) -> jax.Array:
    """(1 - uniform) w / sum w + uniform / K, f32[K]."""
    return (1 - uniform) * weights / jnp.sum(weights) + uniform / weights.shape[0]
