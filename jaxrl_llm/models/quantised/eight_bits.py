"""Numbers of eight bits: the kinds to which arrays are rounded, and the scales that bring numbers into their range."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Array

# Name -> dtype of the values, and the greatest of them.
KINDS: dict[str, tuple[Any, float]] = {"int8": (jnp.int8, 127.0), "float8": (jnp.float8_e4m3fn, 448.0)}
SMALLEST = 1e-30  # what is below is 0


def scale_of(largest: Array, kind: str) -> Array:
    """The scales f32 by which the largest numbers become the greatest value of a kind of KINDS; 1 where they are 0."""
    # XLA divides by a constant in some programs and multiplies by its inverse in others: ties would be rounded up in
    # one and down in the other.
    inverse = np.float32(1 / KINDS[kind][1])
    return jnp.where(largest > SMALLEST, largest.astype(jnp.float32) * inverse, 1.0)


def to_values(scaled: Array, kind: str) -> Array:
    """Numbers f32, scaled to the range of a kind of KINDS, as the nearest values of it."""
    dtype, most = KINDS[kind]
    scaled = jnp.clip(scaled, -most, most)
    return (jnp.round(scaled) if kind == "int8" else scaled).astype(dtype)
