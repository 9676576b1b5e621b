"""The arithmetic of `ratio_clip` on whole rows, shared by plain JAX and one Pallas kernel for TPU, and its formula."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Array = jax.Array

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is far outside any clip range, and its square is finite in float32


class Clipped(NamedTuple):
    """The results of `ratio_clip`, f32[N] each; 0 for rows without a token that counts."""

    value: Array  # sum of the surrogate, weighted by the value's weights
    ratio: Array  # sum of the ratios, weighted by `weights` like all below
    cut_low: Array  # weight of the tokens clipped by the lower bound: ratio below, advantage < 0
    cut_high: Array  # weight of the tokens clipped by the upper bound: ratio above, advantage > 0
    kl: Array  # sum of k3 of the token log-ratios: estimates KL(other || policy) on samples of the policy, in nats
    max_ratio: Array  # largest ratio of the tokens that count, unweighted


class Rows(NamedTuple):
    """What `ratio_clip` reads, f32[N, L] each."""

    logp: Array
    other: Array
    advantages: Array
    weights: Array
    value_weights: Array | None = None  # None: `weights`


class Bounds(NamedTuple):
    """Bounds of the ratio."""

    low: Any  # 1 - `low` of `ratio_clip`
    high: Any  # 1 + `high` of `ratio_clip`
    dual: Any  # the dual clip, or None


def surrogate(ratio: Array, advantages: Array, bounds: Bounds) -> Array:
    """min(rho A, clip(rho, low, high) A); with a dual, at least dual A where A < 0. Elementwise."""
    low, high, dual = bounds
    value = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
    return value if dual is None else jnp.where(advantages < 0, jnp.maximum(value, dual * advantages), value)


def bounded(log_ratio: Array) -> Array:
    """A log-ratio within +-MAX_LOG_RATIO."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio: Array) -> Array:
    """exp(-l) - 1 + l, never negative: J. Schulman, Approximating KL Divergence (2020).

    Computed by its series for |l| < 1/2, where the terms cancel, because Mosaic has no expm1. Exact up to float32
    rounding.
    """
    series = jnp.full_like(log_ratio, -1 / math.factorial(9))
    for power in range(8, 1, -1):
        series = series * log_ratio + (-1) ** power / math.factorial(power)
    return jnp.where(jnp.abs(log_ratio) < 0.5, series * log_ratio**2, jnp.exp(-log_ratio) - 1 + log_ratio)


def of_rows(rows: Rows, bounds: Bounds, *, whole_row: bool, mean: bool) -> tuple[Array, Clipped]:
    """Slopes d value_n / d logp_nt, f32[R, L], and the results of each row, f32[R, 1] each.

    The slopes are forward-mode derivatives of the formula, so at a kink they agree with JAX.
    """
    logp, other, advantages, weights, value_weights = rows
    counts = weights != 0
    # Entries of tokens that do not count can be NaN.
    difference, advantages = (jnp.where(counts, x, 0.0) for x in (logp - other, advantages))
    of_value = weights if value_weights is None else jnp.where(counts, value_weights, 0.0)
    d, d_by_logp = jax.jvp(bounded, (difference,), (counts.astype(difference.dtype),))

    def row_sum(x: Array) -> Array:
        return jnp.sum(x, axis=1, keepdims=True)

    def value_at(exponent: Array) -> tuple[Array, Array]:
        ratio = jnp.exp(exponent)
        return surrogate(ratio, advantages, bounds), ratio

    exponent = d
    if whole_row:
        number = row_sum(counts.astype(d.dtype))
        size = jnp.maximum(number, 1.0) if mean else jnp.ones_like(number)
        s, s_by_sum = jax.jvp(bounded, (row_sum(d) / size,), (1 / size,))
        exponent = jnp.where(counts, s, 0.0)
    value, by_exponent, ratio = jax.jvp(value_at, (exponent,), (jnp.ones_like(exponent),), has_aux=True)
    slope = of_value * by_exponent
    # With one ratio per row, each token changes the ratio of all tokens.
    slope = d_by_logp * (row_sum(slope) * s_by_sum if whole_row else slope)
    return slope, Clipped(
        value=row_sum(of_value * value),
        ratio=row_sum(weights * ratio),
        cut_low=row_sum(jnp.where((ratio < bounds.low) & (advantages < 0), weights, 0.0)),
        cut_high=row_sum(jnp.where((ratio > bounds.high) & (advantages > 0), weights, 0.0)),
        kl=row_sum(weights * k3(d)),
        max_ratio=jnp.max(jnp.where(counts, ratio, 0.0), axis=1, keepdims=True, initial=0.0),
    )


def reference_rows(rows: Rows, bounds: Bounds, *, whole_row: bool, mean: bool) -> Clipped:
    """The formula, for tests: value and statistics of each row, f32[N, 1] each; arguments as of `of_rows`."""
    logp, other, advantages, weights, value_weights = rows
    counts = weights != 0
    A = jnp.where(counts, advantages, 0.0)
    d = token = jnp.clip(jnp.where(counts, logp - other, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    if whole_row:
        number = jnp.sum(counts, axis=1, keepdims=True)
        d = jnp.sum(d, axis=1, keepdims=True) / (jnp.maximum(number, 1) if mean else 1)
        d = jnp.where(counts, jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
    rho = jnp.exp(d)
    value = jnp.minimum(rho * A, jnp.clip(rho, bounds.low, bounds.high) * A)
    if bounds.dual is not None:
        value = jnp.where(A < 0, jnp.maximum(value, bounds.dual * A), value)
    in_value = weights if value_weights is None else jnp.where(counts, value_weights, 0.0)
    return Clipped(
        value=jnp.sum(in_value * value, axis=1, keepdims=True),
        ratio=jnp.sum(weights * rho, axis=1, keepdims=True),
        cut_low=jnp.sum(weights * ((rho < bounds.low) & (A < 0)), axis=1, keepdims=True),
        cut_high=jnp.sum(weights * ((rho > bounds.high) & (A > 0)), axis=1, keepdims=True),
        kl=jnp.sum(weights * (jnp.expm1(-token) + token), axis=1, keepdims=True),
        max_ratio=jnp.max(jnp.where(counts, rho, 0.0), axis=1, keepdims=True, initial=0.0),
    )


ROW_STEP = 8  # sublanes: the tile of float32
MAX_ROWS = 256
BLOCK_BYTES = 512 * 2**10  # of a block of one array; VMEM has up to six of them, double-buffered, and temporaries
LONGEST = BLOCK_BYTES // (4 * ROW_STEP)  # longest row of which ROW_STEP fit in a block


def _rows_kernel(limits: Any, *refs: Any, has_dual: bool, **settings: Any) -> None:
    """One block of rows. limits: f32[3] in SMEM, the bounds; 0 in place of an unused dual clip."""
    *arrays, slope, statistics = refs
    rows = Rows(*(x[...] for x in arrays))
    slope[...], found = of_rows(rows, Bounds(limits[0], limits[1], limits[2] if has_dual else None), **settings)
    column = jax.lax.broadcasted_iota(jnp.int32, statistics.shape, 1)
    table = jnp.zeros(statistics.shape, jnp.float32)
    for place, statistic in enumerate(found):
        table = jnp.where(column == place, statistic, table)
    statistics[...] = table


def pallas_rows(
    rows: Rows, bounds: Bounds, *, whole_row: bool, mean: bool, row_block: int | None, interpret: bool
) -> tuple[Array, Clipped]:
    """The result of `of_rows`, by the kernel; in interpret mode it runs anywhere.

    The grid iterates over blocks of whole rows, because a ratio of the row needs the row's sum before its first slope.
    Undefined rows of a partial last block are never written back, and rows are independent. The compiler may fuse the
    computation of the inputs (masks, broadcast scales) into the kernel, so that they need not be materialised.
    """
    N, L = rows.logp.shape
    fitting = max(ROW_STEP, BLOCK_BYTES // (4 * max(L, 1)) // ROW_STEP * ROW_STEP)
    R = min(N, row_block or min(MAX_ROWS, fitting))
    limits = jnp.stack([*bounds[:2], jnp.zeros_like(bounds.low) if bounds.dual is None else bounds.dual])
    arrays = [x for x in rows if x is not None]
    axes = jax.typeof(rows.logp).manual_axis_type  # inside `jax.shard_map`, results vary as the inputs do
    widths = L, len(Clipped._fields)

    def block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((R, width), lambda n: (n, 0))

    slope, table = pl.pallas_call(
        partial(_rows_kernel, has_dual=bounds.dual is not None, whole_row=whole_row, mean=mean),
        grid=(pl.cdiv(N, R),),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] + [block(L)] * len(arrays),
        out_specs=[block(width) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((N, width), jnp.float32, manual_axis_type=axes) for width in widths],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), allow_input_fusion=(False, *[True] * len(arrays))
        ),
        interpret=interpret,
        name="ratio_clip",
    )(limits, *arrays)
    return slope, Clipped(*jnp.split(table, widths[1], axis=1))
