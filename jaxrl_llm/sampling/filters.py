"""Top-k, top-p and min-p filters, computed without sorting the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Filters(NamedTuple):
    """Which tokens may be drawn. Applied in this order, each to what the previous one kept, as transformers does."""

    top_k: jax.Array | int = 0  # the k most probable tokens; 0 keeps all
    top_p: jax.Array | float = 1.0  # the smallest set of most probable tokens with at least this mass; 1 keeps all
    min_p: jax.Array | float = 0.0  # tokens with at least this fraction of the largest probability; 0 keeps all


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the same order as the float32 x: bits of non-negative floats sort as they are, of negative reversed."""
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # -0.0 equals 0.0
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _floor_of_mass(logits: jax.Array, mass: jax.Array, target: jax.Array) -> jax.Array:
    """int32[N, 1]: the largest ordered logit c such that the tokens with logits >= c have mass >= target.

    Bisection over the 32 bits of a float: exact, 32 passes over [N, V] without a sort. Equal logits are kept together.
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


@jax.named_scope("filters")
def keep(logits: jax.Array, filters: Filters) -> jax.Array:
    """bool[N, V]: which tokens the filters keep. logits: f32[N, V], already divided by the temperature."""
    order = _ordered(logits)
    count = jnp.where(filters.top_k > 0, filters.top_k, logits.shape[-1]).astype(jnp.float32)
    kept = order >= _floor_of_mass(logits, jnp.ones_like(logits), jnp.minimum(count, logits.shape[-1]))
    probability = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    # Rounding can leave the total mass just below 1, so top_p 1 skips the search.
    nucleus = order >= _floor_of_mass(logits, probability, jnp.asarray(filters.top_p, jnp.float32))
    kept = kept & (nucleus | (jnp.asarray(filters.top_p) >= 1.0))
    # With min_p 0 the threshold is -inf, which keeps every token.
    return kept & (logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.asarray(filters.min_p, jnp.float32)))


def support_floor(logits: jax.Array, kept: jax.Array) -> jax.Array:
    """f32[N]: a log-probability between those of kept and dropped tokens; -inf where all are kept.

    It is midway between the smallest kept and the largest dropped one, so that recomputed log-probabilities that differ
    by rounding give the same support.
    """
    least = jnp.min(jnp.where(kept, logits, jnp.inf), axis=-1)
    dropped = jnp.max(jnp.where(kept, -jnp.inf, logits), axis=-1)
    return 0.5 * least + 0.5 * dropped - jax.nn.logsumexp(logits, axis=-1)
