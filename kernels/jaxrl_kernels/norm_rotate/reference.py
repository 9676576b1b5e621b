"""The formula of `norm_rotate`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Norm(NamedTuple):
    """Static numbers of the norm."""

    epsilon: float
    offset: float


def reference(x: Array, weight: Array | None, cos: Array, sin: Array, norm: Norm) -> Array:
    """x [N, L, H, h]; cos, sin [N, L, h / 2]."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    n = x.astype(dtype)
    if weight is not None:
        inverse = jax.lax.rsqrt(jnp.mean(n * n, axis=-1, keepdims=True) + norm.epsilon)
        n = (n * inverse * (norm.offset + weight.astype(dtype))).astype(x.dtype).astype(dtype)
    first, second = jnp.split(n, 2, axis=-1)
    cos, sin = cos[:, :, None].astype(dtype), sin[:, :, None].astype(dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
