"""Which rows to train on, how often, and which of their tokens: ranks, maximum-variance subsets, resampling, shares.

Shapes never depend on data: a selection is a mask or a count per row. Ties are broken by noise keyed on the row's
content (`selection.noise`), so the order of rows does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core.parts import Trajectories, Transform, counted, part
from jaxrl_llm.utils.errors import require_choice


@part
def keep_weighted(factor: Callable[[jax.Array, Trajectories], jax.Array]) -> Transform:
    """Multiply the selection weights by `factor(step, batch)` f32 or bool [N] or [N, L]; 0 drops."""

    def apply(step: jax.Array, batch: Trajectories) -> Trajectories:
        by = factor(step, batch).astype(jnp.float32)
        return batch.replace(weights=batch.loss_weights * (by[:, None] if by.ndim == 1 else by))

    return counted(apply)


def ranks_within(keys: jax.Array, values: jax.Array, ties: jax.Array, valid: jax.Array) -> jax.Array:
    """int32[N]: rank of each row's value among the rows with the same key, 0 for the largest.

    Rows that are not valid rank after all others. Ties go to the smaller `ties` f32[N].
    """
    N = keys.shape[0]
    _, index = jnp.unique(keys, return_inverse=True, size=N)
    order = jnp.lexsort((ties, jnp.where(valid, -values, 0.0), ~valid, index))
    position = jnp.argsort(order)
    return position - jax.ops.segment_min(position, index, num_segments=N)[index]


def max_variance_subset(values: jax.Array, valid: jax.Array, keep: jax.Array | float, ties: jax.Array) -> jax.Array:
    """bool[N]: the subset of `keep` valid rows whose values have maximal variance (D3S, 2509.22115).

    The optimum is the n - k smallest and the k largest values for some k; prefix sums give the variance for every k.
    Ties up to rounding go to the most even split. With fewer valid rows than `keep` all are kept.

    >>> A = jnp.array([-1.5, -0.5, 0.5, 1.5, -0.87, 0, 0.87, 0])
    >>> print(jnp.nonzero(max_variance_subset(A, A < 9, 4, A))[0])
    [0 3 4 6]
    """
    N = values.shape[0]
    M = jnp.sum(valid)
    n = jnp.clip(jnp.asarray(keep), 0, M).astype(jnp.int32)
    mean = jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(M, 1)
    centred = jnp.where(valid, values - mean, 0.0)
    position = M - 1 - ranks_within(jnp.zeros(N, jnp.int32), values, ties, valid)  # ascending; valid rows at 0..M-1
    ascending = jnp.zeros(N).at[jnp.where(valid, position, N)].set(centred, mode="drop")
    largest = jnp.arange(N + 1)

    def taken(x: jax.Array) -> jax.Array:
        """The sum over the n - k smallest and the k largest for every k, f32[N + 1]."""
        sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(x)])
        return sums[jnp.maximum(n - largest, 0)] + sums[M] - sums[jnp.maximum(M - largest, 0)]

    number = jnp.maximum(n, 1)
    variance = taken(ascending**2) / number - (taken(ascending) / number) ** 2
    variance = jnp.where(largest <= n, variance, -jnp.inf)
    good = variance >= jnp.max(variance) - 1e-5 * jnp.mean(centred**2)
    k = jnp.argmin(jnp.where(good, jnp.abs(2 * largest - n), 4 * N))
    return valid & ((position < n - k) | (position >= M - k))


def resampled_counts(
    weights: jax.Array, keys: jax.Array, draws: jax.Array | float, uniform: jax.Array, order: jax.Array
) -> jax.Array:
    """How often each row is drawn, f32[N], in `draws` draws per key with probabilities proportional to weights f32[N].

    Systematic resampling: draw j takes the row at (j + u) / draws of the cumulative weights in ascending `order`, with
    u = uniform f32[N], one number per key. Counts are unbiased, as with independent draws, with less variance: each is
    its expectation rounded up or down. Keys whose weights are all 0 have counts 0.
    """
    N = keys.shape[0]
    _, index = jnp.unique(keys, return_inverse=True, size=N)
    sorting = jnp.lexsort((order, index))
    group, w = index[sorting], weights[sorting]
    sums = jnp.cumsum(w)
    start = jax.ops.segment_min(sums - w, group, num_segments=N)[group]
    total = jnp.maximum(jax.ops.segment_max(sums, group, num_segments=N)[group] - start, 1e-30)
    n = jnp.broadcast_to(jnp.asarray(draws, jnp.float32), (N,))[sorting]
    u = uniform[sorting]

    def passed(position: jax.Array) -> jax.Array:
        return jnp.minimum(jnp.ceil(n * jnp.clip(position / total, 0.0, 1.0) - u), n)

    before = jnp.where(jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]]), 0.0, jnp.roll(sums - start, 1))
    counts = jnp.maximum(passed(sums - start) - passed(before), 0.0)
    return jnp.zeros(N).at[sorting].set(jnp.where(w > 0, counts, 0.0))


SCOPES = ("row", "batch")


def share_up(count: jax.Array, share: jax.Array | float) -> jax.Array:
    """ceil(count * share), robust to float32 rounding of the product."""
    return jnp.ceil(count * share - 1e-4 - 2e-7 * count)


def share_down(count: jax.Array, share: jax.Array | float) -> jax.Array:
    """floor(count * share), robust to float32 rounding of the product."""
    return jnp.floor(count * share + 1e-4 + 2e-7 * count)


def top_tokens(
    score: jax.Array, mask: jax.Array, share: jax.Array | float, ties: jax.Array, scope: Literal["row", "batch"]
) -> jax.Array:
    """The ceil(share * n) of the n masked tokens of each row, or of the batch, with the highest scores f32[N, L].

    Ties go to the smaller `ties` f32[N, L]. share may be one number per row, f32[N, 1].

    >>> score = jnp.array([[0.15, 1.8, 0.6], [1.0, 0.15, 0.3]])
    >>> print(top_tokens(score, score > 0, 0.5, -score, "batch").astype(int))
    [[0 1 1]
     [1 0 0]]
    """
    require_choice("scope", scope, SCOPES)
    shape = score.shape
    if scope == "batch":
        score, mask, ties = (x.reshape(1, -1) for x in (score, mask, ties))
    order = jnp.lexsort((ties, jnp.where(mask, -score, 0.0), ~mask), axis=-1)
    rank = jnp.argsort(order, axis=-1)
    count = jnp.sum(mask, axis=1, keepdims=True)
    return (mask & (rank < share_up(count, share))).reshape(shape)


def late_tokens(action_index: jax.Array, lengths: jax.Array, skip: jax.Array | float) -> jax.Array:
    """The actions of each row except the first min(floor(skip * T), T - 1), T = lengths f32[N]."""
    first = jnp.minimum(share_down(lengths, skip), lengths - 1)
    return (action_index >= 0) & (action_index >= first[:, None])
