"""Normalisation over the groups with a signal, and a bound on the groups of second prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import TOLERANCE
from jaxrl_llm.advantages.normalisation import moments
from jaxrl_llm.advantages.trackers import DEFAULT_PROMPTS
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.counted_rows import without_rows
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments
from jaxrl_llm.core.transform import State, Transform, stateless


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


def superfluous_parts(batch: Trajectories, share: float, replayed: jax.Array | float = 0.0) -> jax.Array:
    """bool[N]: rows of second prompts beyond `share` times the number of new plain groups, rounded down.

    replayed: how many of the plain groups are no new problems. Groups (info["part"] above 0) are kept in ascending
    order of info["solved"], then of their part, then of their number. Without info["part"] no row is of a second
    prompt.
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
    limit = jnp.floor(share * (jnp.sum(first & ~second) - replayed) + 1e-6)
    order = jnp.lexsort((batch.group, info["part"], info["solved"], ~(first & second)))
    rank = jnp.zeros(N, jnp.int32).at[order].set(jnp.arange(N, dtype=jnp.int32))
    beyond = first & second & (rank >= limit)
    return second & jnp.any((batch.group[:, None] == batch.group[None]) & beyond[None], axis=1)


@part
def at_most_parts(share: float, replay_share: float = 0.0, threshold: float = 0.5, most: int = 10_000) -> Transform:
    """Leave out the rows that are `superfluous_parts`, with the replayed problems of `hard_buffer`.

    These are as many as that draws, replay_share times the new ones, or all that its buffer has: the problems whose
    mean reward, info["solved"], was last below the threshold, at most `most`. The state says which problems are.
    """
    check_number("share of second prompts", share, least=0)
    check_number("replay_share", replay_share, least=0)

    def apply(failed: jax.Array, batch: Trajectories) -> tuple[State, Trajectories]:
        info, real = batch.info or {}, jnp.any(batch.action_mask, axis=1)
        if "part" not in info or "solved" not in info:
            return failed, batch
        index = jnp.mod(batch.prompt_id, failed.shape[0])
        asked = real & (info["part"] <= 0)
        problems = jnp.sum(
            jnp.zeros(failed.shape, bool).at[jnp.where(asked, index, failed.shape[0])].set(True, mode="drop")
        )
        stored = jnp.minimum(jnp.sum(failed), most)
        drawn = jnp.minimum(jnp.floor(problems * replay_share / (1 + replay_share) + 0.5), stored)
        out = superfluous_parts(batch, share, drawn)
        known = jnp.where(asked & ~jnp.isnan(info["solved"]), index, failed.shape[0])
        return failed.at[known].set(info["solved"] < threshold, mode="drop"), without_rows(batch, out)

    return Transform(lambda facts: jnp.zeros(facts.prompts or DEFAULT_PROMPTS, bool), apply)
