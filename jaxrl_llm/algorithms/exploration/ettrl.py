from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, revised, vote
from jaxrl_llm.advantages.multipliers import row_mean
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import NonNegative, Ours, Paper, Positive, Ties
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy, sequence_mean
from jaxrl_llm.rollouts.trees import entropy_forks


@batch_part
def confident(batch: Trajectories, rule: str, limit: float, clamp: bool) -> Array:
    """A function `batch -> f32[N, L]`: the advantages, changed by a rule of `ettrl`."""
    A = batch.need("advantages")
    if rule == "clip":
        return jnp.clip(A, -limit, limit)
    entropy = jnp.where(jnp.isnan(batch.scores), jnp.nan, row_mean(batch.need("entropy"), batch.action_mask))
    return A * relative_confidence(entropy, batch.group, clamp)[:, None]


@method(paper="arXiv 2508.11356", test="test_exploration.py::test_ettrl_against_a_loop")
@run_needs(answer_key="votes of answers; without it whole completions vote")
def ettrl(
    rule: Paper[Literal["confidence", "clip"]] = "confidence",
    limit: Paper[Positive] = 2.0,
    clamp: Paper[bool] = False,
    ties: Ours[Ties] = "content",
    trees: Paper[int] = 12,
    forks: Paper[int] = 2,
    branches: Paper[int] = 2,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
) -> Algorithm:
    """Entropy-based test-time RL (ETTRL).

    Rewards are agreement with the majority, as in TTRL (ties as there), and advantages depend on how confident a
    response is relative to its group, by the mean entropy H_i of its tokens. rule is one of

        "confidence"  A_i <- A_i (2 - H_i / mean_g H), the paper's Adv-Res; clamp: clamp the factor at 0
        "clip"        A_i <- clip(A_i, -limit, limit), its Adv-Clip

    on A = (r - mean_g) / std_g with the population standard deviation, then GRPO's loss (clip_low, clip_high).
    Rollout: `rollouts.trees.entropy_forks`, for each prompt `trees` completions, at the `forks` tokens of highest
    entropy of which `branches` others begin; all trees * (1 + forks * branches) vote, with their last numbers.
    """
    return Algorithm(
        transform=chain(vote(None, ties), group_relative(ddof=0), revised(confident(rule, limit, clamp))),
        objective=clipped_policy(clip_low, clip_high, sequence_mean()),
        rollout=entropy_forks(trees, forks, branches),
    )


def relative_confidence(entropy: Array, group: Array, clamp: bool = False) -> Array:
    """Y = 2 - H / (mean H of the group), f32[N]: above 1 for the more confident rows of a group (ETTRL, 2508.11356).

    entropy f32[N], NaN for rows to ignore (Y = 1, also where the group's mean is 0). clamp: clamp Y at 0.

    >>> print(relative_confidence(jnp.array([0.5, 1.0, 1.5]), jnp.zeros(3, jnp.int32)))
    [1.5 1.  0.5]
    """
    _, mean, _ = bucket_moments(group, entropy)
    known = ~jnp.isnan(entropy) & (mean > 1e-12)
    value = jnp.where(known, 2.0 - entropy / jnp.where(known, mean, 1.0), 1.0)
    return jnp.maximum(value, 0.0) if clamp else value
