"""Credit by difficulty bins: prompts in bins by how often they were solved, and a weight for each bin."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import bucket_best
from jaxrl_llm.advantages.trackers import DEFAULT_PROMPTS
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments, bucket_sums
from jaxrl_llm.core.transform import RunFacts, State, Transform


class Bins(NamedTuple):
    """How P prompts did, and the smoothed losses of K bins."""

    tries: jax.Array  # f32[P] groups
    solved: jax.Array  # f32[P] groups with a success
    bin: jax.Array  # int32[P]
    loss: jax.Array  # f32[K], NaN before the first prompt of a bin


def bin_of(accuracy: jax.Array, old: jax.Array, count: int, hysteresis: jax.Array | float = 0.0) -> jax.Array:
    """int32[n]: the bin floor(count * accuracy) of n accuracies, the last one closed.

    A bin above the `old` one needs an accuracy of at least its lower edge + hysteresis, one below at most its upper
    edge - hysteresis.
    """

    def at(x: jax.Array) -> jax.Array:
        return jnp.clip(jnp.floor(count * x + 1e-6), 0, count - 1).astype(jnp.int32)

    target = at(accuracy)
    # An upper edge belongs to the bin below it here, unlike in `at`.
    below = jnp.ceil(count * (accuracy + hysteresis) - 1e-6) - 1
    lower = jnp.maximum(target, jnp.clip(below, 0, count - 1).astype(jnp.int32))
    up, down = jnp.maximum(old, at(accuracy - hysteresis)), jnp.minimum(old, lower)
    return jnp.where(target > old, up, jnp.where(target < old, down, old))


def smoothed_losses(before: jax.Array, losses: jax.Array, rate: jax.Array | float) -> jax.Array:
    """S <- (1 - rate) S + rate l, f32[K]; the first l as it is; S stays where l is NaN."""
    after = jnp.where(jnp.isnan(before), losses, (1 - rate) * before + rate * losses)
    return jnp.where(jnp.isnan(losses), before, after)


def bin_weights(losses: jax.Array, strength: jax.Array | float, limit: jax.Array | float) -> jax.Array:
    """exp(strength clip(S, -limit, limit)), f32[K]; 1 where S is NaN."""
    return jnp.exp(strength * jnp.clip(jnp.nan_to_num(losses), -limit, limit))


def mixed_shares(weights: jax.Array, uniform: jax.Array | float) -> jax.Array:
    """(1 - uniform) w / sum w + uniform / K, f32[K]."""
    return (1 - uniform) * weights / jnp.sum(weights) + uniform / weights.shape[0]


@part
def weigh_by_bin(
    bins: int = 10,
    strength: float = 0.1,
    smoothing: float = 0.1,
    limit: float = 3.0,
    most: float = 10.0,
    hysteresis: float = 0.0,
    success: float = 0.5,
    prompts: int | None = None,
) -> Transform:
    """Multiply advantages by a weight of the prompt's bin, larger for bins in which the policy fails more.

    The bin of a prompt is that of the share of its groups, this one included, in which a score is above `success`. With
    l the mean over the batch's prompts in a bin of the share of failures, 1 - mean score,

        S <- (1 - smoothing) S + smoothing l,    A <- A min(exp(strength clip(S, -limit, limit)), most)

    The state has an entry for each prompt of the run (`RunFacts`), or `prompts` entries if given, or 4096 if neither is
    known; a prompt's entry is prompt_id modulo their number.
    """
    check_number("weigh_by_bin: bins", bins, least=1, whole=True)
    check_number("weigh_by_bin: prompts", prompts, least=1, most=2**31 - 1, whole=True, or_none=True)
    for name, number in {"strength": strength, "limit": limit, "hysteresis": hysteresis, "most": most}.items():
        check_number(f"weigh_by_bin: {name}", number, least=0)
    check_number("weigh_by_bin: smoothing", smoothing, least=0, most=1)

    def start(facts: RunFacts) -> Bins:
        P = prompts or facts.prompts or DEFAULT_PROMPTS
        return Bins(jnp.zeros(P), jnp.zeros(P), jnp.zeros(P, jnp.int32), jnp.full(bins, jnp.nan))

    def apply(state: Bins, batch: Trajectories) -> tuple[State, Trajectories]:
        P = state.tries.shape[0]
        index, r = jnp.mod(batch.prompt_id, P), batch.scores
        known = ~jnp.isnan(r)
        hit = bucket_best(index, jnp.where(known, (r > success).astype(jnp.float32), jnp.nan))
        tries, solved = state.tries[index] + 1, state.solved[index] + hit
        accuracy = solved / tries
        seen = state.tries[index] > 0
        at = jnp.where(seen, bin_of(accuracy, state.bin[index], bins, hysteresis), bin_of(accuracy, 0 * index, bins))
        _, mean, _ = bucket_moments(index, r)
        (n,) = bucket_sums(index, known.astype(jnp.float32))
        share = jnp.where(known, 1 / jnp.maximum(n, 1), 0.0)  # so that each prompt counts once
        mass = jax.ops.segment_sum(share, at, bins)
        total = jax.ops.segment_sum(share * (1 - mean), at, bins)
        loss = smoothed_losses(state.loss, jnp.where(mass > 0, total / jnp.maximum(mass, 1e-9), jnp.nan), smoothing)
        weight = jnp.minimum(bin_weights(loss, strength, limit), most)[at]
        place = jnp.where(known, index, P)  # rows of a prompt write the same values; unscored ones are dropped
        after = Bins(
            state.tries.at[place].set(tries, mode="drop"), state.solved.at[place].set(solved, mode="drop"),
            state.bin.at[place].set(at, mode="drop"), loss,
        )  # fmt: skip
        return after, batch.replace(advantages=batch.need("advantages") * weight[:, None])

    return Transform(start, apply)
