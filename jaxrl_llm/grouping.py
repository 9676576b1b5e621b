"""Statistics by key: samples that share a key are a bucket; buckets may be of any size."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def bucket_sums(keys: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    """For each sample, the sum of each of `values` f32[N] over the samples with the same key int32[N]."""
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    return tuple(jax.ops.segment_sum(v, index, num_segments=keys.shape[0])[index] for v in values)


def bucket_moments(keys: jax.Array, values: jax.Array, ddof: int = 1) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count, mean and standard deviation of each sample's bucket, f32[N] each.

    NaN means not scored: it takes no part. ddof 1 is the sample and 0 the population standard deviation; where a
    bucket has no more than `ddof` scores it is 0. Sums are of the distances to the bucket's greatest value: of equal
    values, however large and many, the mean is that value and the deviation 0, both without rounding.
    """
    known = ~jnp.isnan(values)
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    top = jax.ops.segment_max(jnp.where(known, values, -jnp.inf), index, num_segments=keys.shape[0])[index]
    below = jnp.where(known, values - top, 0.0)
    count, total = bucket_sums(keys, known.astype(jnp.float32), below)
    mean = total / jnp.maximum(count, 1)
    (squares,) = bucket_sums(keys, jnp.where(known, (below - mean) ** 2, 0.0))
    deviation = jnp.sqrt(squares / jnp.maximum(count - ddof, 1)) * (count > ddof)
    return count, jnp.where(count > 0, top + mean, 0.0), deviation
