"""The formula of `ratio_clip` in plain jax.numpy, differentiated by JAX. For tests and for reading."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.ratio_clip.rows import MAX_LOG_RATIO, Bounds, Clipped

Array = jax.Array


def reference_rows(
    logp: Array,
    other: Array,
    advantages: Array,
    weights: Array,
    value_weights: Array | None,
    bounds: Bounds,
    *,
    whole_row: bool,
    mean: bool,
) -> Clipped:
    """Value and statistics of each row, f32[N, 1] each; arguments as of `rows.of_rows`."""
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
