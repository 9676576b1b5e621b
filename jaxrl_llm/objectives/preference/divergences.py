"""Scores of responses by their log-ratio to the reference, one for each f-divergence of f-DPO (2309.16240).

A score is f'(ratio) up to a factor and a constant, chosen so that it is 0, with slope 1, where the two policies agree
(Jensen-Shannon: slope 1/2).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number
from jaxrl_llm.core.parts import batch_part

Divergence = Callable[[jax.Array], jax.Array]  # log-ratios -> scores, of any shape


def reverse_kl(log_ratio: jax.Array) -> jax.Array:
    """u: the implicit reward of DPO."""
    return log_ratio


def forward_kl(log_ratio: jax.Array) -> jax.Array:
    """1 - exp(-u)."""
    return -_expm1(-log_ratio, jnp.log(jnp.finfo(log_ratio.dtype).max) - 3)


def js_divergence(log_ratio: jax.Array) -> jax.Array:
    """log 2 + log sigmoid(u)."""
    return jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio)


@batch_part
def alpha_divergence(log_ratio: jax.Array, alpha: Number = 0.5) -> jax.Array:
    """(exp((alpha - 1) u) - 1) / (alpha - 1); u at alpha = 1. At alpha = 0 it is that of the forward KL divergence.

    The exponent is at most 80, as in TRL: its exponential is finite in float32.
    """
    slope = alpha - 1
    near = jnp.abs(slope) < 1e-6
    safe = jnp.where(near, 1.0, slope)
    return jnp.where(near, log_ratio, _expm1(safe * jnp.where(near, 0.0, log_ratio), 80.0) / safe)


DIVERGENCES: dict[str, Divergence] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence(),
}


def _expm1(x: jax.Array, most: jax.Array | float) -> jax.Array:
    """exp(x) - 1, flat from `most` on: a product of 0 and infinity in a gradient is not a number."""
    return jnp.exp(jnp.minimum(x, most)) - 1  # expm1 would have the slope 0 where it rounds to -1
