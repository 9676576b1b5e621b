"""Verified turns and a buffer of failed queries (DeepTravel; its abstract was read)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.advantages.turns.turns import turn_mask
from jaxrl_llm.algorithms.agents.grpo_roc import of_rows
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.hyperparameters import OURS
from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative
from jaxrl_llm.core.buckets import bucket_sums, joint_key
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.failed_prompts import hard_buffer
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.utils.errors import require_choice


@part
def verified(threshold: float, combine: Literal["all", "mean"]) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the score times whether all turns of its episode pass, or the share that does.

    A turn passes if its reward is at least the threshold. Without rewards of turns the score alone.
    """
    require_choice("combine", combine, ("all", "mean"))

    def score(batch: Trajectories) -> Array:
        if batch.turn_rewards is None:
            return batch.scores
        mask = turn_mask(batch)
        passed = mask & ~(batch.turn_rewards < threshold)
        episode = of_rows(batch, "episode")
        number = jnp.arange(mask.shape[0]) if episode is None else episode.astype(jnp.int32)
        turns, good = (jnp.sum(x, axis=1).astype(jnp.float32) for x in (mask, passed))
        turns, good = bucket_sums(joint_key(batch.group, number), turns, good)
        share = good / jnp.maximum(turns, 1.0)
        return batch.scores * (jnp.where(good == turns, 1.0, 0.0) if combine == "all" else share)

    return score


@method(
    paper="arXiv 2509.21842",
    year=2025,
    test="test_turn_shaped.py::test_deeptravel_by_hand",
    needs={"turn_rewards": "verdicts on turns", "turns": "episodes of several turns"},
    beside={"sandbox": ("the sandbox of cached tools and both verifiers", "the run's environment")},
)
def deeptravel(
    threshold: Annotated[float, OURS] = 0.0,
    combine: Annotated[Literal["all", "mean"], OURS] = "all",
    replay_share: Annotated[Fraction, OURS] = 0.5,
    every: Annotated[Count, OURS] = 4,
    failed_below: Annotated[float, OURS] = 1e-6,
    most_stored: Annotated[int, OURS] = 10_000,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.0,
) -> Algorithm:
    """Verified turns and a buffer of failed queries (DeepTravel; its abstract was read).

    A verifier of the whole answer comes first, and those of its turns count only where it passes:

        R = V_T prod_k V_k    (combine "mean": V_T mean_k V_k)

    V_T is the score. V_k = 1 if the reward of turn k is at least the threshold, else 0: a verifier gives a turn whose
    result the answer contradicts a reward below it. A query that failed in all its samples (mean R < failed_below) is
    kept, and asked again until it is solved: every so many steps replay_share times as many queries come from that
    buffer, of most_stored at most. What is replayed is the query, not old tokens. Then GRPO on R: advantages (epsilon)
    of whole episodes, PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens.

    The travel sandbox and the judges are the environment's; the paper's defaults were not read.
    """
    score = verified(threshold, combine)
    steps = chain(needs_turns(), rescore(score, {"turn_rewards"}), group_relative(epsilon=epsilon))
    loss = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        steps, regularised(loss, token_mean(), kl_coefficient=kl_coefficient),
        curriculum=hard_buffer(replay_share, failed_below, most_stored, every, score),
    )  # fmt: skip
