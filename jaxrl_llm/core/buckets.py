"""Statistics of the samples that share a key, such as their group: they form a bucket, of any size."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number


def bucket_sums(keys: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    """For each of `values` f32[N], the sum over the samples that share a sample's key int32[N]; f32[N] each."""
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    return tuple(jax.ops.segment_sum(v, index, num_segments=keys.shape[0])[index] for v in values)


def joint_key(*keys: jax.Array) -> jax.Array:
    """int32, equal where all keys, of one shape, are equal."""
    size, shape = keys[0].size, keys[0].shape
    indices = [jnp.unique(key.reshape(-1), return_inverse=True, size=size)[1].reshape(-1) for key in keys]
    rows = jnp.stack(indices, axis=1)  # and not a product of the indices, which overflows for many
    return jnp.unique(rows, axis=0, return_inverse=True, size=size)[1].reshape(shape).astype(jnp.int32)


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
