"""Methods that reshape the reward, or weigh the credit, by what is known of a row and its group."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxrl_llm.advantages.difficulty import (
    EDGES,
    RULES,
    easiness_weight,
    promising,
    subgroup_advantage,
    weigh_advantages,
)
from jaxrl_llm.advantages.group import drop_uniform_groups, group_relative, on_actions
from jaxrl_llm.advantages.multi_reward import component as component_of
from jaxrl_llm.advantages.multipliers import row_mean
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import is_off, require_choice
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rewards import transforms as rewards
from jaxrl_llm.rewards.shaping import overlong_penalty
from jaxrl_llm.trajectory import Array, Trajectories
from jaxrl_llm.transform import chain

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

    A right answer reached by a flawed derivation is worth less than a sound one: r = 1 correct (reward > success) and
    sound, 1 - penalty correct and flawed, -1 wrong. With penalty 1 flawed answers gain while fewer are sound than wrong
    and lose afterwards, without a schedule. Advantages are (r - mean_g)/(std_g + epsilon), the loss is DAPO's: a token
    mean of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), at least dual_clip A where A < 0, no KL. Over the last
    overlong_share of max_length (None: the paper's 8192) a penalty of up to 1 is added for length.

    Flawed rows are info "flawed" bool[N], or those whose component "sound" is at most 0.5 (give it the weight 0 in the
    sum); where there is neither, none. The paper has a small judge model find the first wrong step while it samples.
    """
    check_number("penalty", penalty, least=0, most=2)
    longest: Any = 8192.0 if max_length is None else max_length
    parts = [rewards.rescore(lambda b: rewards.graded(b.scores > success, rewards.flawed_rows(b), penalty))]
    if not is_off(overlong_share):
        check_number("overlong_share", overlong_share, above=0, most=1)
        buffer: Any = jnp.maximum(overlong_share * longest, 1e-6)
        parts.append(rewards.rescore(lambda b: b.scores + overlong_penalty(b.lengths, longest, buffer)))
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean())
    return Algorithm(chain(*parts, group_relative(epsilon=epsilon)), objective)


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
    max_length: float | None = None,
) -> Algorithm:
    """Hierarchical Budget Policy Optimization (HBPO, arXiv 2507.15844, 2025).

    The samples of a prompt are told different budgets b of tokens, and those of one budget are a subgroup. Of n tokens,
    with c(x) = scale cos(pi x / (2 max_length)), a correct completion (reward > success) of at most max_length earns

        R = c(n) - slope |n - b| for n > b,  R = c(b) for n <= b;  all others 0
        A = intra_coefficient (mean of R in the subgroup - c(b)) + (R - mean_g R)/(std_g R + epsilon)

    slope None is 1/max_length, max_length None the paper's 4096. The first term is never positive: where all are wrong
    it pushes every sample down. The loss is a token mean of the clipped surrogate (clip_low, clip_high, dual_clip: of
    the framework, not the paper). The released code adds the first term twice (intra_coefficient 2) and takes
    R = min(c(n) - slope |n - b|, c(b)), which also costs a completion short of its budget (flat False).

    Budgets are info "budget" f32[N], which the rollout wrote into the prompt; rows without one (NaN, or no such info)
    have budget_share * max_length. (At max_length itself c(b) is 0, and so would every reward be.)
    """
    longest = 4096.0 if max_length is None else max_length
    step = 1 / longest if slope is None else slope

    def budget(b: Trajectories) -> Array:
        told = (b.info or {}).get("budget", jnp.full(b.group.shape, jnp.nan))
        return jnp.where(jnp.isnan(told), budget_share * longest, told).astype(jnp.float32)

    def reward(b: Trajectories) -> Array:
        held = rewards.budget_reward(b.lengths, budget(b), longest, scale, step, flat)
        return jnp.where(b.scores > success, held, 0.0)

    def advantage(b: Trajectories) -> Array:
        level = rewards.budget_level(budget(b), longest, scale)
        told = budget(b)
        return subgroup_advantage(b.scores, level, b.group, told, coefficient=intra_coefficient, epsilon=epsilon)

    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean())
    return Algorithm(chain(rewards.rescore(reward), on_actions(advantage)), objective)


def unlikeliness_reward(
    coefficient: float = 0.25,
    ranks: str = "paper",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """GRPO with the Unlikeliness Reward (Rewarding the Unlikely, arXiv 2506.02355, 2025).

    A correct sample earns less, the more likely it was among the G of its group, so that rare solutions are not lost:

        r_i = R_i (1 - coefficient (G - rank_i)/G), rank 0 for the highest mean log-probability of its tokens

    ranks "code" has G - 1 - rank_i in place of G - rank_i, as the released code. Equal samples share a rank. Groups of
    equal rewards are left out first. Then GRPO (epsilon) with a token mean of the clipped surrogate (clip_low,
    clip_high) and kl_coefficient times k3. The paper ranks by the probability of the sample, the code by the mean
    log-probability of its tokens, which is what is done here. It gains from two epochs on each batch.
    """
    check_number("coefficient", coefficient, least=0, most=1)
    require_choice("ranks", ranks, ("paper", "code"))
    offset = 1.0 if ranks == "code" else 0.0

    def reward(b: Trajectories) -> Array:
        return rewards.rank_penalty(b.scores, row_mean(b.behaviour_logp, b.action_mask), b.group, coefficient, offset)

    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3")
    return Algorithm(chain(drop_uniform_groups(), rewards.rescore(reward), group_relative(epsilon=epsilon)), objective)


def dgrpo_vital(
    component: str = "",
    low: float = 0.0,
    high: float = 1.0,
    least: float = 0.5,
    weigh: str = "reward",
    scale: str = "std",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
) -> Algorithm:
    """Difficulty-aware GRPO of VITAL (Thinking With Videos, arXiv 2508.04416, 2025).

    The reward of a prompt is multiplied by a weight that falls with the mean reward D of its group:

        R = w Rhat,  w = least + (1 - least) clip(2 - D, 0, 1)

    component: the reward component that is first stretched over its useful range, clip((x - low)/(high - low), 0, 1),
    as the paper does for temporal grounding; "" for none. It must count in the sum with weight 1. Then GRPO (scale,
    clip_low, clip_high, kl_coefficient). With scale "std" a common factor of a group cancels in its advantages (but for
    the epsilon): the method as published then does next to nothing. weigh "advantage" multiplies the advantages
    instead; scale "none" lets the weighted reward act.
    """
    require_choice("weigh", weigh, ("reward", "advantage"))
    check_number("high - low", high - low, above=0)

    def stretched(b: Trajectories) -> Array:
        part = component_of(b, component)
        return b.scores + jnp.where(jnp.isnan(part), 0.0, rewards.useful_range(part, low, high) - part)

    def weight(b: Trajectories) -> Array:
        return easiness_weight(b.scores, b.group, least=least)

    parts = [rewards.rescore(stretched)] if component else []
    if weigh == "reward":
        parts += [rewards.rescore(lambda b: b.scores * weight(b)), group_relative(scale)]
    else:
        parts += [group_relative(scale), weigh_advantages(weight)]
    return Algorithm(chain(*parts), grpo(clip_low, clip_high, kl_coefficient).objective)


def adora(
    rule: str = "length",
    weight: float = 1.0,
    other_weight: float = 0.1,
    success: float = 0.5,
    hard: float = 0.5,
    edges: str = "strict",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    max_length: float | None = None,
) -> Algorithm:
    """Advantage Dynamics via Online Rollout Adaptation (ADORA, arXiv 2602.10019, 2026).

    GRPO's advantages times `weight` for prompts worth learning from now, times `other_weight` for the others. rule:
    "length", the longest correct sample (reward > success) is longer than the mean wrong one; "difficulty", at most
    the share `hard` is correct; "or" and "and" of the two. Wrong samples that were cut off, or have max_length tokens
    (None: the code's 4054), are not counted. The paper has length with 1 and 0.1 for images, and both rules with 2
    and 1 for text, how joined is not settled ("or" there). edges: for groups without a correct or a countable wrong
    sample, "strict" as the released code for text, "lenient" as that for images (`difficulty.length_gain`). The rest
    (clip_low, clip_high, kl_coefficient) is GRPO. success is 1.01 for rewards of the code's kind.
    """
    check_number("other_weight", other_weight, least=0)
    require_choice("rule", rule, RULES)
    require_choice("edges", edges, EDGES)
    longest = 4054.0 if max_length is None else max_length

    def factor(b: Trajectories) -> Array:
        cut_off = b.truncated | (b.lengths >= longest)
        now = promising(b.scores, b.lengths, cut_off, b.group, rule=rule, success=success, hard=hard, edges=edges)
        return jnp.where(now, weight, other_weight)

    transform = chain(group_relative(), weigh_advantages(factor))
    return Algorithm(transform, grpo(clip_low, clip_high, kl_coefficient).objective)
