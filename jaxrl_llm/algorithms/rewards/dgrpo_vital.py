from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, weigh_advantages
from jaxrl_llm.advantages.multi_reward import component as component_of
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import AverageName, Fraction, NonNegative, Number, Ours, Paper, Scale, check_number
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.rewards import transforms as rewards


@method(paper="arXiv 2508.04416", test="test_shaped_reward.py::test_dgrpo_against_a_loop")
@run_needs(calls="calls of tools, for their bonus", failed_calls="calls that gave an error")
@beside("video", "tools that return frames of videos", "a policy that sees")
@beside("filter", "prompts that are always or never solved, taken out before the run", "a filter of the data")
def dgrpo_vital(
    component: Ours[str] = "",
    low: Ours[float] = 0.0,
    high: Ours[float] = 1.0,
    least: Paper[Fraction] = 0.5,
    weigh: Paper[Literal["reward", "advantage"]] = "reward",
    tool_bonus: Ours[float] = 0.5,
    scale: Paper[Scale] = "std",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
    average: Ours[AverageName] = "sequence",
) -> Algorithm:
    """Difficulty-aware GRPO of VITAL (Thinking With Videos).

    Multiplies the rewards of a prompt by a weight that decreases with the mean reward D of its group:

        R = w Rhat,  w = least + (1 - least) clip(2 - D, 0, 1),  Rhat = the score + tool_bonus [a call of a tool worked]

    component: the reward component that is first rescaled from its useful range, clip((x - low) / (high - low), 0, 1),
    as the paper does for temporal grounding (its low and high are not known to us); "" for none. It must have weight 1
    in the combined reward. The rest is GRPO (scale, clip_low, clip_high, kl_coefficient, average).

    With scale "std" a factor common to the group cancels in its advantages, up to GRPO's epsilon, so the method as
    published has almost no effect. weigh "advantage" multiplies the advantages instead; scale "none" has the same
    effect.

    Episodes have turns with tools (--tools, --environment), of which those without an error count; results of tools are
    not trained on. The paper's tools return frames of videos, and prompts that are always or never solved are left out
    before the run; neither is part of the method here. The size of its bonus is not known to us.
    """
    check_number("high - low", high - low, above=0)
    steps = [rewards.rescore(with_useful_range(component, low, high))] if component else []
    steps += [rewards.rescore(rewards.paid_for_calls(tool_bonus), {"calls", "failed_calls"})]
    if weigh == "reward":
        steps += [rewards.rescore(times_weight_of_difficulty(least)), group_relative(scale)]
    else:
        steps += [group_relative(scale), weigh_advantages(weight_of_difficulty(least))]
    return Algorithm(chain(*steps), grpo(clip_low, clip_high, kl_coefficient, average=average).objective)


def easiness_weight(
    reward: Array, group: Array, *, start: Number = 1.0, end: Number = 2.0, least: Number = 0.5
) -> Array:
    """f32[N]: 1 up to a mean group reward of `start`, then falling linearly to `least` at `end` (2508.04416).

    >>> easiness_weight(jnp.array([1.0, 2.0, 0.5]), jnp.array([0, 0, 1])).tolist()
    [0.75, 0.75, 1.0]
    """
    _, mean, _ = bucket_moments(group, reward)
    return least + (1 - least) * jnp.clip((end - mean) / (end - start), 0.0, 1.0)


@batch_part
def with_useful_range(b: Trajectories, component: str, low: float, high: float) -> Array:
    """A function `batch -> f32[N]`: the score with one component rescaled from its useful range."""
    part = component_of(b, component)
    return b.scores + jnp.where(jnp.isnan(part), 0.0, useful_range(part, low, high) - part)


@batch_part
def weight_of_difficulty(b: Trajectories, least: float) -> Array:
    """A function `batch -> f32[N]`: `easiness_weight` of the scores."""
    return easiness_weight(b.scores, b.group, least=least)


@batch_part
def times_weight_of_difficulty(b: Trajectories, least: float) -> Array:
    """A function `batch -> f32[N]`: the scores times `easiness_weight` of them."""
    return b.scores * easiness_weight(b.scores, b.group, least=least)


def useful_range(value: Array, low: Number, high: Number) -> Array:
    """clip((value - low)/(high - low), 0, 1): a score rescaled to the range in which it distinguishes samples."""
    return jnp.clip((value - low) / (high - low), 0.0, 1.0)
