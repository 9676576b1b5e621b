"""Groups balanced by dropping bad samples in excess of the good ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import bucket_moments, bucket_sums
from jaxrl_llm.selection.rows import ranks_within


def balanced(reward: jax.Array, group: jax.Array, noise: jax.Array) -> jax.Array:
    """bool[N]: the samples that are kept when random bad ones are dropped until they do not outnumber the good ones.

    Good: reward >= the group's mean. reward f32[N], NaN where not scored (dropped). Samples with the largest noise
    f32[N] are dropped first.
    """
    known = ~jnp.isnan(reward)
    good = known & (reward >= bucket_moments(group, reward)[1])
    bad = known & ~good
    number_good, number_bad = bucket_sums(group, good.astype(jnp.float32), bad.astype(jnp.float32))
    rank = ranks_within(group, noise, noise, bad)
    return good | (bad & (rank >= number_bad - number_good))
