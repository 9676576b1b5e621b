"""Baselines by key: subtract from each sample's value a statistic of its bucket.

Samples f32[N] that share a key int32[N] form a bucket. NaN means not scored: ignored, with result 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import require_choice
from jaxrl_llm.grouping import bucket_moments, bucket_sums
from jaxrl_llm.selection.rows import ranks_within

BASELINES = ("mean", "leave_one_out", "weighted", "median", "quantile", "best", "none")


def above_baseline(
    values: jax.Array,
    keys: jax.Array,
    baseline: str = "mean",
    *,
    weights: jax.Array | None = None,
    level: jax.Array | float = 0.5,
) -> jax.Array:
    """r_i - b_i, f32[N], with the baseline b of the bucket:

        mean            the mean, including r_i
        leave_one_out   (sum_j r_j - r_i) / (n - 1): independent of the sample, hence unbiased (2402.14740)
        weighted        sum w_j r_j / sum w_j, including the sample itself, `weights` f32[N] >= 0; with w the squared
                        norm of the score function, the minimum-variance constant (2505.23585)
        median          the 0.5-quantile
        quantile        the quantile of `level`
        best            the maximum
        none            0

    The difference is exactly 0 if all values of a bucket are equal or it has a single one, except for "none".

    >>> print(above_baseline(jnp.array([0.2, 0.5, 0.9]), jnp.zeros(3, jnp.int32), "leave_one_out").round(3))
    [-0.5  -0.05  0.55]
    """
    require_choice("baseline", baseline, BASELINES)
    known = ~jnp.isnan(values)
    if baseline == "none":
        return jnp.where(known, values, 0.0)
    if baseline in ("median", "quantile"):
        return jnp.where(known, values - bucket_quantile(keys, values, 0.5 if baseline == "median" else level), 0.0)
    if baseline == "best":
        return jnp.where(known, values - bucket_best(keys, values), 0.0)
    count, mean, _ = bucket_moments(keys, values)
    centred = jnp.where(known, values - mean, 0.0)
    if baseline == "leave_one_out":
        return centred * count / jnp.maximum(count - 1, 1)
    if baseline == "weighted":
        w = jnp.where(known, jnp.ones_like(centred) if weights is None else weights, 0.0)
        mass, pull = bucket_sums(keys, w, w * centred)
        return jnp.where(known, centred - pull / jnp.where(mass > 0, mass, 1.0), 0.0)
    return centred


def bucket_best(keys: jax.Array, values: jax.Array) -> jax.Array:
    """The maximum of each sample's bucket, f32[N]; 0 if no sample is scored."""
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    top = jax.ops.segment_max(jnp.where(jnp.isnan(values), -jnp.inf, values), index, num_segments=keys.shape[0])[index]
    return jnp.where(jnp.isfinite(top), top, 0.0)


def bucket_quantile(keys: jax.Array, values: jax.Array, level: jax.Array | float) -> jax.Array:
    """The linearly interpolated quantile of each sample's bucket, f32[N]; 0 if no sample is scored."""
    return masked_quantile(values[None], (keys[:, None] == keys[None]) & ~jnp.isnan(values)[None], level)


def masked_quantile(values: jax.Array, mask: jax.Array, level: jax.Array | float) -> jax.Array:
    """The linearly interpolated quantile along the last axis of the values where the mask is true; 0 if it never is.

    >>> print(masked_quantile(jnp.array([3.0, 1.0, 9.0]), jnp.array([True, True, False]), 0.25))
    1.5
    """
    check_number("level", level, least=0, most=1)
    count = jnp.sum(mask, axis=-1, keepdims=True)
    in_order = jnp.sort(jnp.where(mask, values, jnp.inf), axis=-1)
    position = level * jnp.maximum(count - 1, 0).astype(jnp.float32)
    below = jnp.floor(position).astype(jnp.int32)
    low, high = (
        jnp.take_along_axis(in_order, jnp.minimum(i, jnp.maximum(count - 1, 0)), axis=-1) for i in (below, below + 1)
    )
    some = count > 0
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    return (low + (position - below) * (high - low))[..., 0]


def margin_over_second(values: jax.Array, keys: jax.Array) -> jax.Array:
    """Maximum minus second largest value for the best sample of each bucket, 0 for the others, f32[N] (2503.19595).

    This is how much the maximum of the bucket would drop without the sample. 0 for ties and in a bucket of one.
    """
    known = ~jnp.isnan(values)
    rank = ranks_within(keys, values, jnp.zeros(values.shape), known)
    second = bucket_best(keys, jnp.where(rank > 0, values, jnp.nan))
    (count,) = bucket_sums(keys, known.astype(jnp.float32))
    return jnp.where(known & (rank == 0) & (count > 1), values - second, 0.0)
