"""Truncated sampling: top-k, top-p and min-p as one floor on the logits, found without sorting the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Filters(NamedTuple):
    """Which tokens may be sampled. Applied in this order, each to what the one before kept, as transformers does."""

    top_k: jax.Array | int = 0  # the k most probable; 0 keeps all
    top_p: jax.Array | float = 1.0  # the fewest most probable tokens with at least this mass; 1 keeps all
    min_p: jax.Array | float = 0.0  # those with at least this fraction of the greatest probability; 0 keeps all


def _ordered(x: jax.Array) -> jax.Array:
    """int32 with the order of the float32 x: non-negative floats sort as their bits, negative ones reversed."""
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # -0.0 equals 0.0
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _floor_of_mass(logits: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """int32[N, 1]: the greatest ordered logit c such that the tokens with logits >= c have mass >= target.

    Bisection over the 32 bits of a float: 32 passes over [N, V] and no sort, exact, and equal logits stay together.
    """
    order = _ordered(logits)
    low = jnp.full((logits.shape[0], 1), jnp.iinfo(jnp.int32).min)
    high = jnp.full((logits.shape[0], 1), jnp.iinfo(jnp.int32).max)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The mean rounded up, without overflow.
        middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)
        enough = jnp.sum(jnp.where(order >= middle, mass, 0.0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]


def keep(logits: jax.Array, filters: Filters) -> jax.Array:
    """bool[N, V]: which tokens the filters keep, given logits f32[N, V] already divided by the temperature."""
    order = _ordered(logits)
    count = jnp.where(filters.top_k > 0, filters.top_k, logits.shape[-1]).astype(jnp.float32)
    kept = order >= _floor_of_mass(logits, jnp.ones_like(logits), jnp.minimum(count, logits.shape[-1]))
    probability = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    # Rounding may leave the sum of all just below 1, so 1 is not looked for.
    nucleus = order >= _floor_of_mass(logits, probability, jnp.asarray(filters.top_p, jnp.float32))
    kept = kept & (nucleus | (jnp.asarray(filters.top_p) >= 1.0))
    # min_p 0 gives a floor of -inf, which every logit reaches.
    return kept & (logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.asarray(filters.min_p, jnp.float32)))


def support_floor(logits: jax.Array, kept: jax.Array) -> jax.Array:
    """f32[N]: a log-probability that separates kept from dropped tokens, -inf where all are kept.

    It lies midway between the least kept and the greatest dropped one, so a recomputation that differs by rounding
    finds the same support.
    """
    least = jnp.min(jnp.where(kept, logits, jnp.inf), axis=-1)
    dropped = jnp.max(jnp.where(kept, -jnp.inf, logits), axis=-1)
    return 0.5 * least + 0.5 * dropped - jax.nn.logsumexp(logits, axis=-1)
