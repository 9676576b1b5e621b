"""Noise keyed on a row's content, not on its index in the batch.

Random choices therefore do not depend on the order of rows, on padding, or on how a batch is split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose output bits depend on all input bits (multiply, shift and xor, twice)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _row_hash(batch: Trajectories, salt: jax.Array | int) -> jax.Array:
    """uint32[N] of each row's prompt and actions; not of their log-probabilities, whose rounding would decide."""
    seed = mix(mix(jnp.asarray(salt).astype(jnp.uint32)) + batch.prompt_id.astype(jnp.uint32))
    position = mix(batch.action_index.astype(jnp.uint32))
    token = mix(mix(batch.tokens.astype(jnp.uint32) + position))
    return mix(seed + jnp.sum(jnp.where(batch.action_mask, token, 0), axis=1, dtype=jnp.uint32))


def _uniform(bits: jax.Array) -> jax.Array:
    """f32 in [0, 1) from the 24 highest bits."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def row_noise(batch: Trajectories, salt: jax.Array | int) -> jax.Array:
    """Uniform noise f32[N] in [0, 1); independent for each salt (e.g. the index of the update)."""
    return _uniform(_row_hash(batch, salt))


def token_noise(batch: Trajectories, salt: jax.Array | int) -> jax.Array:
    """Uniform noise f32[N, L] in [0, 1) for each action."""
    return _uniform(mix(_row_hash(batch, salt)[:, None] + mix(batch.action_index.astype(jnp.uint32))))
