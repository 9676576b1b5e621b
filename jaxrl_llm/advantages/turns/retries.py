"""Credit of episodes of which some were tried again from a turn on."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import bucket_best
from jaxrl_llm.advantages.turns.rounds import EPISODES, one_row_each
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories, bucket_moments, bucket_sums
from jaxrl_llm.core.transform import Transform, stateless
from jaxrl_llm.core.turnwise_updates import turn_in_episode
from jaxrl_llm.utils.errors import require_choice


@part
def from_pivot() -> Transform:
    """Train on the turns of an episode from info["pivot"] f32[N] on alone: the weights of those before become 0."""

    def apply(batch: Trajectories) -> Trajectories:
        pivot = (batch.info or {}).get("pivot")
        if pivot is None:
            return batch
        before = turn_in_episode(batch) < jnp.nan_to_num(pivot)[:, None]
        weights = jnp.ones(batch.tokens.shape, jnp.float32) if batch.weights is None else batch.weights
        return batch.replace(weights=jnp.where(before & batch.action_mask, 0.0, weights))

    return stateless(apply, {"pivot", *EPISODES})


def amplified_advantages(
    scores: Array,
    group: Array,
    counted: Array,
    alpha: float | Array = 3.0,
    full_reward: float | Array = 1.0,
    temperature: float | Array | None = None,
) -> Array:
    """Advantages in which good samples weigh more, f32[N] (R3L, arXiv 2601.03715).

        A_i = 1 if r_i >= full_reward,    alpha (r_i - b) if r_i >= b,    r_i - b otherwise

    b is the mean of the group's scores that are counted, bool[N], or with a temperature tau log mean exp(r / tau); 0 in
    a group of one. NaN means not scored, and gets 0.

    >>> amplified_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.zeros(4, int), jnp.ones(4, bool)).tolist()
    [1.0, -0.25, -0.25, -0.25]
    """
    known = jnp.where(counted, scores, jnp.nan)
    count, b, _ = bucket_moments(group, known)
    if temperature is not None:
        top = bucket_best(group, known)
        inner = jnp.where(jnp.isnan(known), 0.0, jnp.exp((known - top) / temperature))
        (total,) = bucket_sums(group, inner)
        b = top + temperature * jnp.log(jnp.maximum(total, 1e-30) / jnp.maximum(count, 1))
    above = scores - jnp.where(count > 1, b, 0.0)
    A = jnp.where(scores >= full_reward, 1.0, jnp.where(above >= 0, alpha * above, above))
    return jnp.where(jnp.isnan(scores), 0.0, A)


@part
def amplified(
    alpha: float = 3.0,
    full_reward: float = 1.0,
    baseline: Literal["mean", "log_mean_exp"] = "mean",
    temperature: float = 1.0,
) -> Transform:
    """Write `amplified_advantages` on all actions of a row. An episode of several rows counts once in its group.

    temperature: of the baseline "log_mean_exp". InputError for another baseline.
    """
    require_choice("baseline", baseline, ("mean", "log_mean_exp"))
    check_number("alpha", alpha, least=0)
    check_number("full_reward", full_reward)
    check_number("temperature", temperature, above=0)
    tau = temperature if baseline == "log_mean_exp" else None

    def apply(batch: Trajectories) -> Trajectories:
        A = amplified_advantages(batch.scores, batch.group, one_row_each(batch), alpha, full_reward, tau)
        return batch.replace(advantages=A[:, None] * batch.action_mask)

    return stateless(apply, EPISODES)
