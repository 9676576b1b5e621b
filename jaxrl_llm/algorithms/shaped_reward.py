"""Methods that reshape rewards, or weight advantages, by properties of a row and its group."""

from __future__ import annotations

from typing import Any, Literal

from jaxrl_llm.advantages.difficulty import (
    EDGES,
    RULES,
    weigh_advantages,
)
from jaxrl_llm.advantages.group import drop_uniform_groups, group_relative, on_actions
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.algorithms.reward_rules import (
    advantage_within_budget,
    given_budgets,
    graded_by_soundness,
    less_for_likely,
    reward_within_budget,
    times_weight_of_difficulty,
    weight_of_difficulty,
    weight_of_promise,
    with_overlong_penalty,
    with_tool_bonus,
    with_useful_range,
)
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName, Rule, Scale
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rewards import transforms as rewards
from jaxrl_llm.rollouts.guidance.prompted import with_budgets
from jaxrl_llm.utils.errors import InputError, is_off, require_choice, shown

__all__ = ["adora", "dgrpo_vital", "fapo", "hbpo", "unlikeliness_reward"]


def fapo(
    penalty: float = 1.0,
    success: float = 0.5,
    overlong_share: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 10.0,
    epsilon: float = 1e-6,
    max_length: float | None = None,
) -> Algorithm:
    """Flawed-Aware Policy Optimization (FAPO, arXiv 2510.22543, 2025).

    A correct answer with a flawed derivation gets less reward than one with a sound one: r = 1 if correct (reward >
    success) and sound, 1 - penalty if correct and flawed, -1 if wrong. With penalty 1 the advantage of flawed answers
    is positive while wrong answers outnumber sound ones and negative afterwards, without a schedule. As in DAPO, a
    length penalty falls linearly from 0 to -1 over the last overlong_share of max_length (8192 where None). The loss is
    DAPO's too: with A = (r - mean_g) / (std_g + epsilon), a token mean of
    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), at most dual_clip |A| where A < 0, without KL.

    Flawed rows are info["flawed"] bool[N]; without it, those whose component "sound" (give it weight 0 in the sum) is
    at most 0.5; without both, none. In the paper a small judge model looks for the first wrong step.

    Defaults. Paper: penalty. Code: overlong_share, clip_low, clip_high, dual_clip, epsilon. Ours: success.
    Run: max_length.
    """
    check_number("penalty", penalty, least=0, most=2)
    longest: Any = 8192.0 if max_length is None else max_length
    steps = [rewards.rescore(graded_by_soundness(success, penalty), {"sound"})]
    if not is_off(overlong_share):
        check_number("overlong_share", overlong_share, above=0, most=1)
        steps.append(rewards.rescore(with_overlong_penalty(longest, overlong_share)))
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean())
    return Algorithm(chain(*steps, group_relative(epsilon=epsilon)), objective)


@presets(paper={"intra_coefficient": 1.0, "flat": True}, code={"intra_coefficient": 2.0, "flat": False})
def hbpo(
    scale: float = 4.0,
    slope: float | None = None,
    budget_share: float = 0.5,
    success: float = 0.5,
    intra_coefficient: float = 1.0,
    flat: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
    epsilon: float = 1e-6,
    shares: str = "0.125 0.25 0.5 0.625",
    max_length: float | None = None,
) -> Algorithm:
    """Hierarchical Budget Policy Optimization (HBPO, arXiv 2507.15844, 2025).

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

    Defaults. Paper: scale, slope, intra_coefficient, flat, shares. Code: clip_low, clip_high, dual_clip, epsilon.
    Ours: budget_share, success. Run: max_length.
    """
    longest = 4096.0 if max_length is None else max_length
    step = 1 / longest if slope is None else slope

    budgets = given_budgets(budget_share * longest)
    reward = reward_within_budget(budgets, success, longest, scale, step, flat)
    advantage = advantage_within_budget(budgets, longest, scale, intra_coefficient, epsilon)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean())
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


def unlikeliness_reward(
    coefficient: float = 0.25,
    ranks: Literal["paper", "code"] = "paper",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """GRPO with the Unlikeliness Reward (Rewarding the Unlikely, arXiv 2506.02355, 2025).

    Reduces the reward of a correct sample the more likely it is within its group of G, so that rare solutions survive:

        r_i = R_i (1 - coefficient (G - rank_i) / G), rank 0 for the highest mean log-probability of its tokens

    ranks "code" has G - 1 - rank_i in place of G - rank_i, as in the released code. The paper ranks by the sample's
    probability; here, as in the code, by the mean log-probability of its tokens under the behaviour policy. Ranks
    include wrong samples; equal samples share a rank. Groups of equal rewards are dropped first. The rest is GRPO
    (epsilon) with a token mean of PPO's clip (clip_low, clip_high) and kl_coefficient times k3. Two epochs per batch
    strengthen the effect.

    Defaults. Paper: coefficient, ranks. Code: clip_low, clip_high, kl_coefficient, epsilon.
    """
    check_number("coefficient", coefficient, least=0, most=1)
    require_choice("ranks", ranks, ("paper", "code"))
    offset = 1.0 if ranks == "code" else 0.0

    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3")
    return Algorithm(
        chain(
            drop_uniform_groups(),
            rewards.rescore(less_for_likely(coefficient, offset)),
            group_relative(epsilon=epsilon),
        ),
        objective,
    )


def dgrpo_vital(
    component: str = "",
    low: float = 0.0,
    high: float = 1.0,
    least: float = 0.5,
    weigh: Literal["reward", "advantage"] = "reward",
    tool_bonus: float = 0.5,
    scale: Scale = "std",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
    average: AverageName = "sequence",
) -> Algorithm:
    """Difficulty-aware GRPO of VITAL (Thinking With Videos, arXiv 2508.04416, 2025).

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

    Defaults. Paper: least, weigh, scale. Ours: component, low, high, tool_bonus, clip_low, clip_high, kl_coefficient,
    average.
    """
    require_choice("weigh", weigh, ("reward", "advantage"))
    check_number("high - low", high - low, above=0)

    steps = [rewards.rescore(with_useful_range(component, low, high))] if component else []
    steps += [rewards.rescore(with_tool_bonus(tool_bonus), {"calls", "failed_calls"})]
    if weigh == "reward":
        steps += [rewards.rescore(times_weight_of_difficulty(least)), group_relative(scale)]
    else:
        steps += [group_relative(scale), weigh_advantages(weight_of_difficulty(least))]
    return Algorithm(
        chain(*steps),
        grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average).objective,
    )


def adora(
    rule: Rule = "length",
    weight: float = 1.0,
    other_weight: float = 0.1,
    success: float = 0.5,
    hard: float = 0.5,
    edges: Literal["lenient", "strict"] = "strict",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    average: AverageName = "token",
    max_length: float | None = None,
) -> Algorithm:
    """Advantage Dynamics via Online Rollout Adaptation (ADORA, arXiv 2602.10019, 2026).

    Multiplies GRPO's advantages by `weight` for prompts that satisfy a rule in this batch, by `other_weight` for the
    others. rule: "length", the longest correct sample (reward > success) is longer than the mean wrong one;
    "difficulty", at most the share `hard` of the samples is correct; "or" and "and" of both. Wrong samples that are
    truncated, or have max_length tokens (4054 where None), are ignored. edges, for groups without a correct sample or a
    wrong one that is not ignored: "strict" is the released code for text, "lenient" that for images
    (`difficulty.length_gain`).

    The code has the length rule with weights 1 and 0.1. According to reviews of the paper this is its choice for
    images; for text it combines both rules, in an unspecified way, with weights 2 and 1. The code's rewards need
    success 1.01. The rest is GRPO with clip_low, clip_high, kl_coefficient and average (the code for images has
    "sequence").

    Defaults. Paper: hard. Code: rule, weight, other_weight, edges, clip_low, clip_high, kl_coefficient, average.
    Ours: success. Run: max_length.
    """
    check_number("other_weight", other_weight, least=0)
    require_choice("rule", rule, RULES)
    require_choice("edges", edges, EDGES)
    longest = 4054.0 if max_length is None else max_length

    transform = chain(
        group_relative(), weigh_advantages(weight_of_promise(rule, weight, other_weight, success, hard, edges, longest))
    )
    return Algorithm(
        transform,
        grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average).objective,
    )
