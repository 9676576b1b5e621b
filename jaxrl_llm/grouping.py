"""Statistics by key: samples that share a key form a bucket, of any size."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def bucket_sums(keys: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    """For each of `values` f32[N], the sum over the samples that share a sample's key int32[N]; f32[N] each."""
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    return tuple(jax.ops.segment_sum(v, index, num_segments=keys.shape[0])[index] for v in values)


def bucket_moments(keys: jax.Array, values: jax.Array, ddof: int = 1) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count, mean and standard deviation of each sample's bucket, f32[N] each.

    NaN marks a sample that is not scored; it is ignored. ddof 1 gives the sample and 0 the population standard
    deviation, which is 0 for buckets of at most `ddof` scores. Sums are taken of differences from the bucket's maximum,
    so equal values, however large or many, give exactly that value as the mean and exactly 0 as the deviation.
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
