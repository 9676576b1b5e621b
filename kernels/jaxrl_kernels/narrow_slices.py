"""Slices written into arrays of 8 or 16 bits an element, which XLA for CPUs would convert to float32 as a whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
BITS = {1: jnp.uint8, 2: jnp.uint16}


def put_slice(old: Array, new: Array, start: Any, axis: int) -> Array:
    """`old` with `new`, of its dtype, from `start` on along an axis; as `dynamic_update_slice_in_dim`.

    XLA for CPUs (jaxlib 0.10) has no operations in bfloat16 but products and moves of whole arrays: to write a slice it
    converts the array there and back. Of bits it makes a copy at most, where the array changes its type in a loop.
    """

    def plain(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis)

    def of_bits(old: Array, new: Array) -> Array:
        bits = BITS[old.dtype.itemsize]
        written = plain(*(jax.lax.bitcast_convert_type(x, bits) for x in (old, new)))
        return jax.lax.bitcast_convert_type(written, old.dtype)

    if not (jnp.issubdtype(old.dtype, jnp.floating) and old.dtype.itemsize in BITS):
        return plain(old, new)
    return jax.lax.platform_dependent(old, new, cpu=of_bits, default=plain)
