"""Tracked baselines: a running estimate of each prompt's expected reward."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages.group import standardised
from jaxrl_llm.core.annotations import Count, Fraction, NonNegative, NonNegativeInt, Number, Positive, check_number
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, State, Trajectories, Transform, part


class Tracker(NamedTuple):
    """A Beta distribution for each of P prompts, as mean and number of observations: alpha = value * memory."""

    value: Array  # f32[P]
    memory: Array  # f32[P] effective number of observations, alpha + beta
    seen: Array  # bool[P]


def start_tracker(prompts: int, value: Number = 0.5, memory: Number = 1.0) -> Tracker:
    """The tracker of unseen prompts: a prior (by default mean 0.5 with the weight of one observation)."""
    v, m = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (prompts,)) for x in (value, memory))
    return Tracker(v, m, jnp.zeros(prompts, bool))


def retention(divergence: Array, half_life: Number = 0.06, least: Number = 0.875, most: Number = 0.96) -> Array:
    """clip(2^(-D / half_life), least, most): the share of its memory that a tracker keeps if the policy moved by D."""
    return jnp.clip(jnp.exp2(-divergence / half_life), least, most)


def track(tracker: Tracker, index: Array, reward: Array, kept: Array) -> Tracker:
    """alpha <- kept alpha + sum r, beta <- kept beta + sum (1 - r), over the rewards f32[N] of the entries `index`
    int32[N]; NaN is ignored. In terms of the mean, v <- v + sum (r - v) / (kept (alpha + beta) + n), which is valid for
    rewards of any range. kept f32[N]: the share of the memory to keep (the mean where the rows of a prompt differ).
    """
    known = ~jnp.isnan(reward)
    n, total, share = bucket_sums(index, *(jnp.where(known, x, 0.0) for x in (jnp.ones_like(reward), reward, kept)))
    memory = share / jnp.maximum(n, 1) * tracker.memory[index] + n
    value = tracker.value[index] + (total - n * tracker.value[index]) / jnp.maximum(memory, 1e-9)
    # All rows of a prompt write the same values, so duplicates are harmless; unscored rows are dropped.
    at = jnp.where(known, index, tracker.value.shape[0])
    return Tracker(
        tracker.value.at[at].set(value, mode="drop"),
        tracker.memory.at[at].set(memory, mode="drop"),
        tracker.seen.at[at].set(True, mode="drop"),
    )


def uncertainty(value: Array, least: Number = 0.05) -> Array:
    """sqrt(v (1 - v)) + least: the sampling weight of a prompt by the uncertainty of its outcome."""
    return jnp.sqrt(jnp.clip(value * (1 - value), 0.0)) + least


DEFAULT_PROMPTS = 4096  # entries of a tracker when neither `prompts` nor the run gives their number


@part
def tracked_baseline(
    prompts: Count | None = None,
    half_life: Positive = 0.06,
    least: Fraction = 0.875,
    most: Fraction = 0.96,
    epsilon: NonNegative = 1e-8,
    offline: NonNegativeInt = 0,
) -> Transform:
    """A = r - v(x), v the tracker's estimate for the prompt before this batch, standardised over the batch's samples.

    The state is a Tracker with one entry per prompt of the run (`RunFacts`), or with `prompts` entries if given, or
    4096 if neither is known. A prompt's entry is prompt_id modulo the number of entries. info["drift"] f32[N] is how
    far the policy moved since it last answered the prompt; at the first visit it counts as 0, and where it is NaN or
    there is none the share of memory kept is `least`. Rows that are only measured (info["measured"]) get the weight 0.

    offline: number of samples of each prompt before the run, whose mean reward is info["start_value"]: an unseen prompt
    then starts as `offline_value` says, with the memory 1/(1 - least). 0: at the prior.
    """
    if offline:
        check_number("least", least, below=1)

    def apply(tracker: Tracker, batch: Trajectories) -> tuple[State, Trajectories]:
        index = jnp.mod(batch.prompt_id, tracker.value.shape[0])
        info = batch.info or {}
        r = batch.scores
        if "measured" in info:
            trained = ~(info["measured"] > 0)
            r = jnp.where(trained, r, jnp.nan)
            batch = batch.replace(weights=trained[:, None] * batch.loss_weights)
        if offline and "start_value" in info:
            tracker = _started(tracker, index, jnp.where(jnp.isnan(r), jnp.nan, info["start_value"]), offline, least)
        A = standardised(r - tracker.value[index], epsilon=epsilon)
        kept = jnp.broadcast_to(jnp.asarray(least, jnp.float32), r.shape)
        if "drift" in info:
            D = jnp.where(tracker.seen[index], info["drift"], 0.0)
            kept = jnp.where(jnp.isnan(D), least, retention(D, half_life, least, most))
        return track(tracker, index, r, kept), batch.replace(advantages=A[:, None] * batch.action_mask)

    needs = {"drift", "old_logp", "measured"} | ({"start_value"} if offline else set())
    return Transform(lambda facts: start_tracker(prompts or facts.prompts or DEFAULT_PROMPTS), apply, frozenset(needs))


def offline_value(mean: Array, samples: Array | int) -> Array:
    """(n mean + 1/2) / (n + 1): the start value of a tracker from the mean reward of n samples, kept off 0 and 1."""
    return (samples * mean + 0.5) / (samples + 1)


def _started(tracker: Tracker, index: Array, mean: Array, samples: int, least: float) -> Tracker:
    """The tracker with the entries of unseen prompts started from their mean reward f32[N]; NaN starts nothing."""
    at = jnp.where(jnp.isnan(mean) | tracker.seen[index], tracker.value.shape[0], index)
    return tracker._replace(
        value=tracker.value.at[at].set(offline_value(mean, samples), mode="drop"),
        memory=tracker.memory.at[at].set(1 / (1 - least), mode="drop"),
    )
