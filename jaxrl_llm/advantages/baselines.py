"""Baselines by key: what a sample's value is compared with, so that good means better than expected.

Samples f32[N] that share a key int32[N] are a bucket. NaN is not scored: it takes no part and gets 0.
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
    """r_i - b_i, f32[N], with b from the other values of the bucket:

        mean            their mean, r_i included
        leave_one_out   (sum_j r_j - r_i) / (n - 1): independent of the sample, so without bias (2402.14740)
        weighted        sum w_j r_j / sum w_j, `weights` f32[N], at least 0, in which a sample's own counts too; with
                        w the squared norm of its score, the constant of least variance (2505.23585)
        median          the 0.5-quantile; quantile: that of `level`
        best            the greatest
        none            0

    Of equal values the difference is 0 exactly, and so is that of the only one of a bucket, except from "none".

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
    """The greatest value of each sample's bucket, f32[N]; 0 where there is none."""
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    top = jax.ops.segment_max(jnp.where(jnp.isnan(values), -jnp.inf, values), index, num_segments=keys.shape[0])[index]
    return jnp.where(jnp.isfinite(top), top, 0.0)


def bucket_quantile(keys: jax.Array, values: jax.Array, level: jax.Array | float) -> jax.Array:
    """The quantile of each sample's bucket, f32[N], linear between its values; 0 where there is none."""
    return masked_quantile(values[None], (keys[:, None] == keys[None]) & ~jnp.isnan(values)[None], level)


def masked_quantile(values: jax.Array, mask: jax.Array, level: jax.Array | float) -> jax.Array:
    """The quantile along the last axis of what the mask has, linear between values; 0 where it has nothing.

    >>> print(masked_quantile(jnp.array([3.0, 1.0, 9.0]), jnp.array([True, True, False]), 0.25))
    1.5
    """
    check_number("level", level, least=0, most=1)
    count = jnp.sum(mask, axis=-1, keepdims=True)
    in_order = jnp.sort(jnp.where(mask, values, jnp.inf), axis=-1)
    place = level * jnp.maximum(count - 1, 0).astype(jnp.float32)
    below = jnp.floor(place).astype(jnp.int32)
    low, high = (
        jnp.take_along_axis(in_order, jnp.minimum(i, jnp.maximum(count - 1, 0)), axis=-1) for i in (below, below + 1)
    )
    some = count > 0
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    return (low + (place - below) * (high - low))[..., 0]


def margin_over_second(values: jax.Array, keys: jax.Array) -> jax.Array:
    """Best minus second best for the best of each bucket, 0 for the others, f32[N] (2503.19595).

    That of the best is its expected gain in E[max] over a bucket without it. Equal bests, and the only one, get 0.
    """
    known = ~jnp.isnan(values)
    rank = ranks_within(keys, values, jnp.zeros(values.shape), known)
    second = bucket_best(keys, jnp.where(rank > 0, values, jnp.nan))
    (count,) = bucket_sums(keys, known.astype(jnp.float32))
    return jnp.where(known & (rank == 0) & (count > 1), values - second, 0.0)
