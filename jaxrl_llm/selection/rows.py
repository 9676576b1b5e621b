"""Which rows to train on, how often, and which of their tokens: ranks, maximum-variance subsets, resampling, shares.

Shapes never depend on data: a selection is a mask or a count per row. Ties are broken by noise keyed on the row's
content, not on its index: random choices do not depend on the order of rows, on padding, or on how a batch is split.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core.parts import Array, Trajectories, counted_part
from jaxrl_llm.utils.errors import require_choice


@counted_part()
def keep_weighted(step: Array, batch: Trajectories, factor: Callable[[Array, Trajectories], Array]) -> Trajectories:
    """Multiply the selection weights by `factor(step, batch)` f32 or bool [N] or [N, L]; 0 drops."""
    by = factor(step, batch).astype(jnp.float32)
    return batch.replace(weights=batch.loss_weights * (by[:, None] if by.ndim == 1 else by))


def ranks_within(keys: Array, values: Array, ties: Array, valid: Array) -> Array:
    """int32[N]: rank of each row's value among the rows with the same key, 0 for the largest.

    Rows that are not valid rank after all others. Ties go to the smaller `ties` f32[N].
    """
    N = keys.shape[0]
    _, index = jnp.unique(keys, return_inverse=True, size=N)
    position = jnp.argsort(jnp.lexsort((ties, jnp.where(valid, -values, 0.0), ~valid, index)))
    return position - jax.ops.segment_min(position, index, num_segments=N)[index]


def max_variance_subset(values: Array, valid: Array, keep: Array | float, ties: Array) -> Array:
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

    def taken(x: Array) -> Array:
        """The sum over the n - k smallest and the k largest for every k, f32[N + 1]."""
        sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(x)])
        return sums[jnp.maximum(n - largest, 0)] + sums[M] - sums[jnp.maximum(M - largest, 0)]

    number = jnp.maximum(n, 1)
    variance = taken(ascending**2) / number - (taken(ascending) / number) ** 2
    variance = jnp.where(largest <= n, variance, -jnp.inf)
    good = variance >= jnp.max(variance) - 1e-5 * jnp.mean(centred**2)
    k = jnp.argmin(jnp.where(good, jnp.abs(2 * largest - n), 4 * N))
    return valid & ((position < n - k) | (position >= M - k))


def resampled_counts(weights: Array, keys: Array, draws: Array | float, uniform: Array, order: Array) -> Array:
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

    def passed(position: Array) -> Array:
        return jnp.minimum(jnp.ceil(n * jnp.clip(position / total, 0.0, 1.0) - u), n)

    before = jnp.where(jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]]), 0.0, jnp.roll(sums - start, 1))
    counts = jnp.maximum(passed(sums - start) - passed(before), 0.0)
    return jnp.zeros(N).at[sorting].set(jnp.where(w > 0, counts, 0.0))


def share_up(count: Array, share: Array | float) -> Array:
    """ceil(count * share), robust to float32 rounding of the product."""
    return jnp.ceil(count * share - 1e-4 - 2e-7 * count)


def share_down(count: Array, share: Array | float) -> Array:
    """floor(count * share), robust to float32 rounding of the product."""
    return jnp.floor(count * share + 1e-4 + 2e-7 * count)


def top_tokens(score: Array, mask: Array, share: Array | float, ties: Array, scope: Literal["row", "batch"]) -> Array:
    """The ceil(share * n) of the n masked tokens of each row, or of the batch, with the highest scores f32[N, L].

    Ties go to the smaller `ties` f32[N, L]. share may be one number per row, f32[N, 1].

    >>> score = jnp.array([[0.15, 1.8, 0.6], [1.0, 0.15, 0.3]])
    >>> print(top_tokens(score, score > 0, 0.5, -score, "batch").astype(int))
    [[0 1 1]
     [1 0 0]]
    """
    require_choice("scope", scope, ("row", "batch"))
    shape = score.shape
    if scope == "batch":
        score, mask, ties = (x.reshape(1, -1) for x in (score, mask, ties))
    rank = jnp.argsort(jnp.lexsort((ties, jnp.where(mask, -score, 0.0), ~mask), axis=-1), axis=-1)
    return (mask & (rank < share_up(jnp.sum(mask, axis=1, keepdims=True), share))).reshape(shape)


def late_tokens(action_index: Array, lengths: Array, skip: Array | float) -> Array:
    """The actions of each row except the first min(floor(skip * T), T - 1), T = lengths f32[N]."""
    first = jnp.minimum(share_down(lengths, skip), lengths - 1)
    return (action_index >= 0) & (action_index >= first[:, None])


def mix(x: Array) -> Array:
    """A bijection of uint32 whose output bits depend on all input bits (multiply, shift and xor, twice)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _row_hash(batch: Trajectories, salt: Array | int) -> Array:
    """uint32[N] of each row's prompt and actions; not of their log-probabilities, whose rounding would decide."""
    seed = mix(mix(jnp.asarray(salt).astype(jnp.uint32)) + batch.prompt_id.astype(jnp.uint32))
    token = mix(mix(batch.tokens.astype(jnp.uint32) + mix(batch.action_index.astype(jnp.uint32))))
    return mix(seed + jnp.sum(jnp.where(batch.action_mask, token, 0), axis=1, dtype=jnp.uint32))


def _uniform(bits: Array) -> Array:
    """f32 in [0, 1) from the 24 highest bits."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def row_noise(batch: Trajectories, salt: Array | int) -> Array:
    """Uniform noise f32[N] in [0, 1); independent for each salt (e.g. the index of the update)."""
    return _uniform(_row_hash(batch, salt))


def token_noise(batch: Trajectories, salt: Array | int) -> Array:
    """Uniform noise f32[N, L] in [0, 1) for each action."""
    return _uniform(mix(_row_hash(batch, salt)[:, None] + mix(batch.action_index.astype(jnp.uint32))))
