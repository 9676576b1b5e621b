"""Turn-level REINFORCE leave-one-out (TRLOO of Dr. Kernel)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax.numpy as jnp

from jaxrl_llm.advantages.filters import drop_rows
from jaxrl_llm.advantages.turns.turns import OfTurns, compared, group_keys, turn_advantages, turn_count, turn_returns
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.buckets import joint_key
from jaxrl_llm.core.hyperparameters import OURS, PAPER
from jaxrl_llm.core.ranges import NonNegative
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.off_policy import importance_correction, mismatch


@part
def has_unlikely_token(least: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: rows with a token whose ratio pi_old / pi_behaviour is below `least`."""
    return lambda batch: jnp.min(mismatch(batch), axis=1) < jnp.log(least)


@method(
    paper="arXiv 2602.05885",
    year=2026,
    test="test_turn_credit.py::test_trloo_worked_example",
    needs={"turn_rewards": "rewards of each turn", "turns": "episodes of several turns"},
    beside={"profiling": ("the rejection of right kernels that a profiler finds idle", "the run's environment")},
)
def trloo(
    gamma: Annotated[float, PAPER] = 1.0,
    tolerance: Annotated[float | None, OURS] = None,
    unlikely: Annotated[float, PAPER] = 1e-4,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.28,
) -> Algorithm:
    """Turn-level REINFORCE leave-one-out (TRLOO of Dr. Kernel).

    Each turn has a reward of its own, and its return is compared with the others' at the same turn of the group:

        A_t = G_t - mean_{j != i} G_{j,t},    G_t = sum_{u >= t} gamma^(u - t) r_u

    over the episodes that have a turn t, which is unbiased however many these are; the only one gets G_t, as in the
    released code. The advantage is on all tokens of the turn, in PPO's clip (clip_low, clip_high) averaged over tokens,
    without a penalty.

    With a tolerance (paper: 0.001) episodes are left out of the loss, but not of the means, where the geometric mean of
    the ratios of trainer to sampler is not within 1 +- tolerance, or where a token's is below `unlikely`. It is off by
    default, since samplers that agree with the trainer need none. The rewards of kernels, and the rejection of right
    ones that the profiler finds idle, belong to their environment.
    """
    means = compared(turn_returns(gamma), same_turn(), baseline="leave_one_out", alone="value")
    credit = turn_advantages(means, needs={"turn_rewards"})
    if tolerance is not None:
        near = importance_correction("geometric", "reject", 1 - tolerance, 1 + tolerance, leave_count=True)
        credit = chain(credit, drop_rows(has_unlikely_token(unlikely)), near)
    return Algorithm(credit, policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()))


@part
def same_turn() -> OfTurns:
    """Keys: turns of a group with the same index."""

    def keys(batch: Trajectories) -> Array:
        turns = turn_count(batch)
        group = group_keys(batch, turns)
        return joint_key(group, jnp.broadcast_to(jnp.arange(turns), group.shape))

    return keys
