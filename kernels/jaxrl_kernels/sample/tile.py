"""What one tile of the vocabulary tells about each row, and how tiles are put together; shared by all fast paths.

As in `fused_logprob`, the largest logit m and sum_v exp(z_v - m) are kept apart, never as log-sum-exp, because
z - m - log_sum is exact for the likeliest token however large the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.logprob.reference import EXCLUDED
from jaxrl_kernels.sample.noise import bits_of_tile, gumbel

Array = jax.Array
NOWHERE = 2**30  # the index of the highest score in a row of NaN


class Sums(NamedTuple):
    """Six numbers a row over the tokens seen so far, f32[N, 1] and int32[N, 1]. z are logits after temperature."""

    score: Array  # max_v z_v + noise_v
    token: Array  # int32: the v that reaches it, the lowest one of several
    logit: Array  # z at that token
    maximum: Array  # m = max_v z_v
    total: Array  # sum_v exp(z_v - m)
    weighted: Array  # sum_v exp(z_v - m) (z_v - m)


def scores(
    hidden: Array,
    tile: Array,
    keys: Array,
    temperature: Array,
    permitted: Array | None,
    start: Any,
    softcap: float,
    aligned: bool,
) -> tuple[Array, Array]:
    """The logits z of one tile, f32[N, T], and z + noise, whose maximum is the token drawn.

    hidden: [N, D]; tile: [T, D], rows of the unembedding; keys: uint32[N, 2]; temperature: f32[N, 1]; permitted:
    bool[N, T] or [1, T]; start: the token of the tile's first row; aligned: as of `bits_of_tile`.
    """
    dtype = jnp.result_type(hidden, tile)
    contract_last = (((1,), (1,)), ((), ()))
    z = jax.lax.dot_general(hidden.astype(dtype), tile.astype(dtype), contract_last, preferred_element_type=jnp.float32)
    if softcap:
        z = softcap * jnp.tanh(z / softcap)
    greedy = temperature == 0
    z = z / jnp.where(greedy, 1.0, temperature)
    z = jnp.maximum(z if permitted is None else jnp.where(permitted, z, EXCLUDED), EXCLUDED)
    # No noise brings an excluded token back: EXCLUDED + noise is EXCLUDED in float32.
    return z, jnp.where(greedy, z, z + gumbel(bits_of_tile(keys, start, tile.shape[0], aligned)))


def of_tile(z: Array, score: Array, start: Any) -> Sums:
    """Sums of one tile from what `scores` gives. Both must be values in memory, not formulas to be worked out twice.

    A compiler that repeats the formula of `score` for its maximum and for the comparison with it, rounding otherwise,
    would find no token at the maximum: callers whose tiles XLA compiles put an optimization barrier between.
    """
    highest = jnp.max(score, axis=1, keepdims=True)
    column = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    # The lowest index of several; five times faster than argmax on a CPU.
    best = jnp.min(jnp.where(score == highest, column, NOWHERE), axis=1, keepdims=True)
    maximum = jnp.max(z, axis=1, keepdims=True)
    shifted = z - maximum
    exponential = jnp.exp(shifted)
    return Sums(
        highest,
        start + best,
        jnp.max(jnp.where(column == best, z, EXCLUDED), axis=1, keepdims=True),
        maximum,
        jnp.sum(exponential, axis=1, keepdims=True),
        jnp.sum(exponential * shifted, axis=1, keepdims=True),
    )


def rescaled(sums: Sums, maximum: Array) -> tuple[Array, Array]:
    """`total` and `weighted` for another, not smaller, maximum."""
    shift = sums.maximum - maximum
    return jnp.exp(shift) * sums.total, jnp.exp(shift) * (sums.weighted + shift * sums.total)


def merge(a: Sums, b: Sums) -> Sums:
    """Sums of the tokens of both, in any order."""
    take_b = (b.score > a.score) | ((b.score == a.score) & (b.token < a.token))
    score, token, logit = (jnp.where(take_b, new, old) for new, old in zip(b[:3], a[:3], strict=True))
    maximum = jnp.maximum(a.maximum, b.maximum)
    (total_a, weighted_a), (total_b, weighted_b) = rescaled(a, maximum), rescaled(b, maximum)
    return Sums(score, token, logit, maximum, total_a + total_b, weighted_a + weighted_b)


def finish(sums: Sums) -> tuple[Array, Array, Array]:
    """(token int32[N], logp f32[N], entropy f32[N]) of the whole vocabulary's sums."""
    _, token, logit, maximum, total, weighted = (x[:, 0] for x in sums)
    log_total = jnp.log(total)
    nothing = maximum <= EXCLUDED
    logp = jnp.where(nothing, -jnp.inf, logit - maximum - log_total)
    entropy = jnp.where(nothing, 0.0, log_total - weighted / total)
    return jnp.where(nothing | jnp.isnan(logp), -1, token), logp, entropy
