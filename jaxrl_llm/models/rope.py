"""Rotary position embeddings and the ways in which long-context models rescale their frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Rope:
    """Which rotation frequencies a layer uses. `kind` decides which of the other fields matter.

    default: theta^(-2i/d).   linear: those divided by `factor` (position interpolation, arXiv 2306.15595).
    llama3: low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1).
    yarn: ramp between interpolation and extrapolation, and scaled attention (arXiv 2309.00071).
    factors: frequency i divided by `factors[i]` (how GGUF files store llama3 scaling).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0  # >= 1: by how much the context was stretched
    original_length: int = 0  # tokens; context length before stretching (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations above which a frequency is kept
    beta_slow: float = 1.0  # yarn: rotations below which it is interpolated
    attention_factor: float = 0.0  # yarn: scale of cos and sin; 0 means 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    factors: tuple[float, ...] = ()


KINDS = ("default", "linear", "llama3", "yarn", "factors")


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Rotation per position, f32[head_dim / 2] in radians, and the factor on cos and sin."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = rope.theta**-exponent
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32), 1.0
    if rope.kind == "factors":
        return (base / np.asarray(rope.factors)).astype(np.float32), 1.0
    if rope.kind == "llama3":
        wavelength = 2 * np.pi / base
        turns = rope.original_length / wavelength
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        return (keep * base + (1 - keep) * base / rope.factor).astype(np.float32), 1.0
    if rope.kind == "yarn":

        def dimension(rotations: float) -> float:
            """The (fractional) dimension that makes this many rotations over the original context."""
            turns = rope.original_length / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        scale = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
        return ((1 - ramp) * base + ramp * base / rope.factor).astype(np.float32), scale
    return base.astype(np.float32), 1.0


def rotation(
    ropes: tuple[Rope, ...], head_dim: int, positions: jax.Array, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """cos and sin for each rope, [R, N, L, head_dim / 2] in `dtype`, from positions int32[N, L]."""
    tables = [frequencies(rope, head_dim) for rope in ropes]
    rate = jnp.asarray(np.stack([rate for rate, _ in tables]))
    scale = jnp.asarray([scale for _, scale in tables], dtype)[:, None, None, None]
    angle = positions.astype(dtype)[None, :, :, None] * rate[:, None, None, :]
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [N, L, heads, head_dim]; dimensions i and i + head_dim / 2 are a pair; in the dtype of cos."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
