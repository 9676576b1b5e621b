from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_advantage, on_actions
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import AboveOne, AtLeastOne, Code, Fraction, NonNegative, Number, OfRun, Ours, Paper
from jaxrl_llm.core.buckets import bucket_moments, joint_key
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rewards import transforms as rewards
from jaxrl_llm.rollouts.guidance.prompted import with_budgets
from jaxrl_llm.utils.errors import InputError, shown


@method(paper="arXiv 2507.15844", test="test_shaped_reward.py::test_hbpo_against_a_loop")
@presets(paper={"intra_coefficient": 1.0, "flat": True}, code={"intra_coefficient": 2.0, "flat": False})
def hbpo(
    scale: Paper[float] = 4.0,
    slope: Paper[float | None] = None,
    budget_share: Ours[Fraction] = 0.5,
    success: Ours[float] = 0.5,
    intra_coefficient: Paper[NonNegative] = 1.0,
    flat: Paper[bool] = True,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.28,
    dual_clip: Code[AboveOne] = 3.0,
    epsilon: Code[NonNegative] = 1e-6,
    shares: Paper[str] = "0.125 0.25 0.5 0.625",
    max_length: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Hierarchical Budget Policy Optimization (HBPO).

    The samples of a prompt are given different token budgets b, and those of one budget form a subgroup. With n tokens
    and c(x) = scale cos(pi x / (2 max_length)), the reward of a correct completion (reward > success) is

        R = c(n) - slope |n - b| for b < n <= max_length,  R = c(b) for n <= b;  0 for all other completions
        A = intra_coefficient (mean of R in the subgroup - c(b)) + (R - mean_g R) / (std_g R + epsilon)

    slope None is 1 / max_length; max_length is 4096 where None. The first term of A is never positive, so in a group
    without a correct completion every advantage is negative. The loss is a token mean of PPO's clip (clip_low,
    clip_high, dual_clip: defaults of the code's framework). The released code (preset "code") adds the first term twice
    (intra_coefficient = 2) and has R = min(c(n) - slope |n - b|, c(b)), which also penalises completions shorter than
    their budget (flat = False).

    The budgets are the `shares`, numbers in a text, of max_length (the paper's 512, 1024, 2048 and 2560 of 4096), in
    equal parts of a group, which needs as many samples. A sample begins after the text "<think> I will answer the
    question with b tokens", which belongs to its prompt; evaluation has no such text. Where another rollout gives no
    info["budget"], b = budget_share * max_length. (At b = max_length every reward would be 0.)
    """
    longest = 4096.0 if max_length is None else max_length
    step = 1 / longest if slope is None else slope

    budgets = given_budgets(budget_share * longest)
    reward = reward_within_budget(budgets, success, longest, scale, step, flat)
    advantage = advantage_within_budget(budgets, longest, scale, intra_coefficient, epsilon)
    objective = clipped_policy(clip_low, clip_high, dual=dual_clip)
    told = with_budgets(*budgets_of(shares, longest))
    return Algorithm(chain(rewards.rescore(reward, {"budget"}), on_actions(advantage)), objective, rollout=told)


def budgets_of(shares: str, longest: float) -> list[int]:
    """The budgets, at least 1 token, that are these shares of the longest completion; InputError for other texts.

    >>> budgets_of("0.125 0.5", 4096)
    [512, 2048]
    """
    try:
        numbers = [float(one) for one in shares.replace(",", " ").split()]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < one < 1 for one in numbers):
        raise InputError(f"hbpo: shares is {shown(shares)}, but must be numbers between 0 and 1, such as '0.25 0.5'")
    return [max(round(one * longest), 1) for one in numbers]


def subgroup_advantage(
    reward: Array, target: Array, group: Array, subgroup: Array, *, coefficient: Number = 1.0, epsilon: float = 1e-6
) -> Array:
    """A_i = coefficient (mean of the subgroup - target_i) + (r_i - mean_g)/(std_g + epsilon), f32[N] (2507.15844).

    reward f32[N], NaN where not scored (ignored, advantage 0); target f32[N], the highest reward that the subgroup can
    reach; subgroup [N] partitions the groups. All samples of a subgroup with one target share the first term. A group
    of one has advantage 0.
    """
    count, _, _ = bucket_moments(group, reward)
    _, mean, _ = bucket_moments(joint_key(group, subgroup), reward)
    within = jnp.where(jnp.isnan(reward) | (count < 2), 0.0, mean - target)
    return coefficient * within + group_advantage(reward, group, epsilon=epsilon)


@batch_part
def given_budgets(b: Trajectories, otherwise: float) -> Array:
    """A function `batch -> f32[N]`: info["budget"], or another budget where there is none."""
    return b.entry("budget", otherwise).astype(jnp.float32)


@batch_part
def reward_within_budget(
    b: Trajectories,
    budgets: Callable[[Trajectories], Array],
    success: float,
    longest: float,
    scale: float,
    slope: float,
    flat: bool,
) -> Array:
    """A function `batch -> f32[N]`: the rewards of `hbpo`."""
    held = budget_reward(b.lengths, budgets(b), longest, scale, slope, flat)
    return jnp.where(b.scores > success, held, 0.0)


@batch_part
def advantage_within_budget(
    b: Trajectories,
    budgets: Callable[[Trajectories], Array],
    longest: float,
    scale: float,
    coefficient: float,
    epsilon: float,
) -> Array:
    """A function `batch -> f32[N]`: the advantages of `hbpo`."""
    level = budget_level(budgets(b), longest, scale)
    return subgroup_advantage(b.scores, level, b.group, budgets(b), coefficient=coefficient, epsilon=epsilon)


def budget_level(tokens: Array, max_length: Number, scale: Number = 4.0) -> Array:
    """scale cos(pi tokens / (2 max_length)): `scale` for 0 tokens, 0 for max_length tokens."""
    return scale * jnp.cos(jnp.pi * tokens / (2 * max_length))


def budget_reward(
    lengths: Array, budget: Array, max_length: Number, scale: Number = 4.0, slope: Number = 0.0, flat: bool = True
) -> Array:
    """Reward of a correct completion of n tokens whose prompt stated a budget b, f32[N] (HBPO, 2507.15844).

    With c = `budget_level`: c(n) - slope |n - b| for b < n <= max_length, c(b) for n <= b, and 0 above max_length.
    flat=False: min(c(n) - slope |n - b|, c(b)) on both sides, which penalises completions shorter than the budget too.
    """
    level = budget_level(budget, max_length, scale)
    over = budget_level(lengths, max_length, scale) - slope * jnp.abs(lengths - budget)
    held = jnp.where(lengths > budget, over, level) if flat else jnp.minimum(over, level)
    return jnp.where(lengths <= max_length, held, 0.0)
