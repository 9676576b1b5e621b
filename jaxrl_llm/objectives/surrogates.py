"""Surrogates: from ratio and advantage to the value of a token, whose gradient improves the policy."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError
from jaxrl_llm.transform import Metrics

# (ratio f32[N, L], advantages f32[N, L]) -> (value to maximise f32[N, L], per-token statistics to average)
Surrogate = Callable[[jax.Array, jax.Array], tuple[jax.Array, Metrics]]


def clipped_value(ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> jax.Array:
    """min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, 1707.06347); elementwise.

    >>> print(clipped_value(jnp.array([1.5, 1.5]), jnp.array([1.0, -1.0]), 0.2, 0.2))
    [ 1.2 -1.5]
    """
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


def clip(low: float = 0.2, high: float = 0.2) -> Surrogate:
    """PPO's clipped surrogate; a higher `high` is DAPO's clip-higher. Both at least 0, low at most 1.

    Statistics: the fractions of tokens whose gradient the clip cut, below and above.
    """
    if not (0 <= low <= 1 and high >= 0):
        raise InputError(f"clip: low is {low} and high is {high}, but low must be in [0, 1] and high at least 0")

    def surrogate(ratio: jax.Array, advantages: jax.Array) -> tuple[jax.Array, Metrics]:
        cut_low = (ratio < 1 - low) & (advantages < 0)
        cut_high = (ratio > 1 + high) & (advantages > 0)
        return clipped_value(ratio, advantages, low, high), {
            "clip/low": cut_low.astype(jnp.float32),
            "clip/high": cut_high.astype(jnp.float32),
        }

    return surrogate
