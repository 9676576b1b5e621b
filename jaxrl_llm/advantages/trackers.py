"""Baselines with a memory: what is expected of a prompt, from what it gave before."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import standardised
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.grouping import bucket_sums
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import State, Transform


class Tracker(NamedTuple):
    """A Beta distribution for each of P prompts, as mean and number of observations: alpha = value * memory."""

    value: jax.Array  # f32[P]
    memory: jax.Array  # f32[P] what it remembers, in observations: alpha + beta
    seen: jax.Array  # bool[P]


def start_tracker(prompts: int, value: jax.Array | float = 0.5, memory: jax.Array | float = 1.0) -> Tracker:
    """That of prompts of which nothing is known but a first guess (0.5 of the weight of one observation)."""
    v, m = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (prompts,)) for x in (value, memory))
    return Tracker(v, m, jnp.zeros(prompts, bool))


def retention(
    divergence: jax.Array,
    half_life: jax.Array | float = 0.06,
    least: jax.Array | float = 0.875,
    most: jax.Array | float = 0.96,
) -> jax.Array:
    """clip(2^(-D / half_life), least, most): how much of its memory a tracker keeps when the policy moved by D."""
    return jnp.clip(jnp.exp2(-divergence / half_life), least, most)


def track(tracker: Tracker, place: jax.Array, reward: jax.Array, kept: jax.Array) -> Tracker:
    """alpha <- kept alpha + sum r, beta <- kept beta + sum (1 - r), over the rewards f32[N] of the prompts `place`
    int32[N]; NaN takes no part. In terms of the mean, v <- v + sum (r - v) / (kept (alpha + beta) + n), which holds
    for rewards of any range. kept f32[N]: the share of the memory to keep, of the prompt (its mean where rows differ).
    """
    known = ~jnp.isnan(reward)
    n, total, share = bucket_sums(place, *(jnp.where(known, x, 0.0) for x in (jnp.ones_like(reward), reward, kept)))
    memory = share / jnp.maximum(n, 1) * tracker.memory[place] + n
    value = tracker.value[place] + (total - n * tracker.value[place]) / jnp.maximum(memory, 1e-9)
    # Rows of one prompt agree on what to write, so it does not matter which does; unscored rows write nowhere.
    at = jnp.where(known, place, tracker.value.shape[0])
    return Tracker(
        tracker.value.at[at].set(value, mode="drop"),
        tracker.memory.at[at].set(memory, mode="drop"),
        tracker.seen.at[at].set(True, mode="drop"),
    )


def uncertainty(value: jax.Array, least: jax.Array | float = 0.05) -> jax.Array:
    """sqrt(v (1 - v)) + least: how much is to be learnt from a prompt; draw prompts in proportion to it."""
    return jnp.sqrt(jnp.clip(value * (1 - value), 0.0)) + least


PROMPTS = 4096  # places of a tracker that knows neither its number nor the run's


def tracked_baseline(
    prompts: int | None = None,
    half_life: float = 0.06,
    least: float = 0.875,
    most: float = 0.96,
    epsilon: float = 1e-8,
) -> Transform:
    """A = r - v(x), v what the tracker of the prompt said before this batch, standardised over the batch's samples.

    The state is a Tracker with a place for each prompt of the run (`RunFacts`), so that no two share one; with
    `prompts` it has that many instead, and where neither is known 4096: a prompt's place is prompt_id modulo their
    number. How far the policy moved since it last answered the prompt is info["drift"] f32[N], where given (a prompt's
    first answer keeps the most); without it the memory kept is `least`, the shortest.
    """
    check_number("prompts", prompts, least=1, most=2**31 - 1, whole=True, or_none=True)
    check_number("epsilon", epsilon, least=0)
    check_number("half_life", half_life, above=0)
    for name, number in {"least": least, "most": most}.items():
        check_number(name, number, least=0, most=1)

    def apply(tracker: Tracker, batch: Trajectories) -> tuple[State, Trajectories]:
        place, r = jnp.mod(batch.prompt_id, tracker.value.shape[0]), batch.scores
        A = standardised(r - tracker.value[place], epsilon=epsilon)
        drift = (batch.info or {}).get("drift")
        if drift is None:
            kept = jnp.broadcast_to(jnp.asarray(least, jnp.float32), r.shape)
        else:
            kept = retention(jnp.where(tracker.seen[place], drift, 0.0), half_life, least, most)
        return track(tracker, place, r, kept), batch.replace(advantages=A[:, None] * batch.action_mask)

    return Transform(lambda facts: start_tracker(prompts or facts.prompts or PROMPTS), apply)
