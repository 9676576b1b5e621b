"""Rewards of turns that an implicit reward model gives: how much more probable it makes their tokens than the policy.

The model is a copy of the policy that learns beside it from preferences between episodes
(`objectives.preference.implicit`).
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.turns.turns import OfTurns, sums_of_turns, turn_mask
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories, bucket_moments
from jaxrl_llm.utils.errors import require_choice

IMPLICIT = frozenset({"implicit_logp", "old_logp"})


@part
def implicit_rewards(beta: float = 0.05) -> OfTurns:
    """Values: beta sum (log pi_phi - log pi_old) over the tokens of each turn (2509.19199).

    pi_phi is the reward model before the update. Needs implicit_logp and old_logp.
    """
    check_number("beta", beta, least=0)

    def rewards(batch: Trajectories) -> Array:
        gain = batch.need("implicit_logp") - batch.need("old_logp")
        return jnp.where(turn_mask(batch), beta * sums_of_turns(gain, batch), 0.0)

    return rewards


@part
def above_first_turns(
    values: OfTurns,
    scale: Literal["none", "std"] = "none",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    epsilon: float = 1e-6,
) -> OfTurns:
    """Advantages of turns: the values less the mean over the first turns of the group's G episodes.

    baseline "leave_one_out" multiplies the difference by G / (G - 1); scale "std" divides it by the deviation (n - 1)
    of the first turns + epsilon. A group with one episode gets 0.
    """
    require_choice("scale", scale, ("none", "std"))
    require_choice("baseline", baseline, ("mean", "leave_one_out"))

    def advantage(batch: Trajectories) -> Array:
        mask, own = turn_mask(batch), values(batch)
        of_first = jnp.take_along_axis(own, jnp.argmax(mask, axis=1)[:, None], axis=1)[:, 0]
        first = jnp.where(jnp.any(mask, axis=1), of_first, jnp.nan)
        count, mean, deviation = (x[:, None] for x in bucket_moments(batch.group, first))
        above = own - mean
        if baseline == "leave_one_out":
            above = above * count / jnp.maximum(count - 1, 1)
        if scale == "std":
            above = above / (deviation + epsilon)
        return jnp.where(mask & (count > 1), above, 0.0)

    return advantage
