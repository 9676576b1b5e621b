"""Normalisation over the groups with a signal, and a bound on the groups of second prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import TOLERANCE
from jaxrl_llm.advantages.normalisation import moments
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.expressions import part
from jaxrl_llm.rewards.transforms import leave_out
from jaxrl_llm.trajectory import Trajectories, bucket_moments
from jaxrl_llm.transform import Transform, stateless


def over_informative_groups(reward: jax.Array, group: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """(r - mean_g - mu)/(sigma + epsilon), f32[N], in groups whose rewards differ, 0 in the others.

    mu (0 but for rounding) and sigma, of the population, are moments of r - mean_g over the rows of these groups. NaN
    marks a row that is not scored; its result is 0.
    """
    _, mean, deviation = bucket_moments(group, reward, 0)
    informative = ~jnp.isnan(reward) & (deviation > TOLERANCE)
    centred = jnp.where(informative, reward - mean, 0.0)
    mu, variance = moments(centred, informative, 0)
    return jnp.where(informative, (centred - mu) / (jnp.sqrt(variance) + epsilon), 0.0)


@part
def informative_relative(epsilon: float = 1e-6) -> Transform:
    """`over_informative_groups` of the scores, on every action of a row."""
    check_number("epsilon", epsilon, least=0)

    def apply(batch: Trajectories) -> Trajectories:
        advantage = over_informative_groups(batch.scores, batch.group, epsilon)
        return batch.replace(advantages=advantage[:, None] * batch.action_mask)

    return stateless(apply)


def superfluous_parts(batch: Trajectories, share: float) -> jax.Array:
    """bool[N]: rows of second prompts beyond `share` times the number of plain groups, rounded down.

    Groups (info["part"] above 0) are kept in ascending order of info["solved"], then of their part, then of their
    number. Without info["part"] no row is of a second prompt.
    """
    info, N = batch.info or {}, batch.group.shape[0]
    if "part" not in info or "solved" not in info:
        return jnp.zeros(N, bool)
    real = jnp.any(batch.action_mask, axis=1)
    second = real & (info["part"] > 0)
    # One row for each group: its first with an action.
    place = jnp.arange(N)
    earlier = (batch.group[:, None] == batch.group[None]) & real[None] & (place[None] < place[:, None])
    first = real & ~jnp.any(earlier, axis=1)
    limit = jnp.floor(share * jnp.sum(first & ~second) + 1e-6)
    order = jnp.lexsort((batch.group, info["part"], info["solved"], ~(first & second)))
    rank = jnp.zeros(N, jnp.int32).at[order].set(jnp.arange(N, dtype=jnp.int32))
    beyond = first & second & (rank >= limit)
    return second & jnp.any((batch.group[:, None] == batch.group[None]) & beyond[None], axis=1)


@part
def at_most_parts(share: float) -> Transform:
    """Leave out the rows that are `superfluous_parts`."""
    check_number("share of second prompts", share, least=0)
    return leave_out(lambda batch: superfluous_parts(batch, share))
