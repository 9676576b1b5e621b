"""REINFORCE and its variants: the score function times reward minus baseline, without a critic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import (
    SCALES,
    above_baseline,
    group_advantage,
    group_relative,
    mixed_groups,
    on_actions,
    row_lengths,
    standardised,
    uniform_groups,
)
from jaxrl_llm.advantages.kl_rewards import kl_reward
from jaxrl_llm.advantages.returns import discounted_returns, terminal_rewards
from jaxrl_llm.advantages.tokens.baselines import energy_weighted_baseline
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.choices import AverageName, Baseline, Scale
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Objective, Transform, chain, stateless
from jaxrl_llm.objectives import (
    clip,
    log_probability,
    policy_gradient,
    sequence_mean,
    sequence_ratio,
    sequence_sum,
    token_mean,
    token_ratio,
)
from jaxrl_llm.objectives.averaging.averages import average_by_name
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.objectives.weights import capped
from jaxrl_llm.utils.errors import is_off, require_choice

__all__ = ["gpg", "opo", "optimal_token_baseline", "reinforce", "remax", "rloo"]


@part
def minus_baseline(
    baseline: Literal["batch", "group", "leave_one_out", "none"],
) -> Callable[[Trajectories], Trajectories]:
    """A function of the batch that subtracts a baseline of `reinforce` from the advantages."""

    def subtract(batch: Trajectories) -> Trajectories:
        keys = jnp.zeros_like(batch.group) if baseline == "batch" else batch.group
        kind: Baseline = baseline if baseline == "leave_one_out" or baseline == "none" else "mean"
        r = batch.scores
        b = jnp.nan_to_num(r) - above_baseline(r, keys, kind)
        shifted = batch.need("advantages") - jnp.where(jnp.isnan(r), 0.0, b)[:, None]
        return batch.replace(advantages=jnp.where(batch.action_mask, shifted, 0.0))

    return subtract


def reinforce(
    baseline: Literal["batch", "group", "leave_one_out", "none"] = "batch",
    gamma: float = 1.0,
    average: AverageName = "sum",
    importance_cap: float | None = None,
) -> Algorithm:
    """REINFORCE (Simple statistical gradient-following algorithms, Machine Learning 8, 1992; before arXiv).

    The base case: the log-probability of each sampled token, weighted by the return minus a baseline.

        G_t = sum_{s >= t} gamma^(s - t) r_s,    A_t = G_t - b,    loss = -1/N sum_i sum_t A_t log pi(a_t)

    baseline: b is the mean score of the batch ("batch"), of the prompt's group ("group"), of the group's other samples
    ("leave_one_out"), or 0 ("none"). gamma: discount per token; the score is the last token's reward. average: "sum"
    (the gradient of the sequence's log-probability), "token", "sequence" (each divided by its length), or another of
    `average_by_name`. importance_cap: weights min(pi / pi_behaviour, cap) under stop-gradient, for off-policy data;
    None: no weights.

    Defaults. Paper: gamma, average, importance_cap. Ours: baseline.
    """
    require_choice("baseline", baseline, ("batch", "group", "leave_one_out", "none"))
    check_number("importance_cap", importance_cap, above=0, or_none=True)
    weight = None if importance_cap is None else capped(importance_cap)
    objective = averaged_gradient(log_probability(weight), average)

    return Algorithm(chain(discounted_returns(gamma), stateless(minus_baseline(baseline))), objective)


@part
def leave_one_out(normalise: bool, epsilon: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the total reward minus the mean of the group's others."""

    def advantage(batch: Trajectories) -> jax.Array:
        R = _total_reward(batch)
        A = above_baseline(R, batch.group, "leave_one_out")
        return standardised(jnp.where(jnp.isnan(R), jnp.nan, A), epsilon=epsilon) if normalise else A

    return advantage


def rloo(
    kl_coefficient: float = 0.03,
    loss: Literal["policy_gradient", "sequence_clip", "token_clip"] = "policy_gradient",
    clip_range: float = 0.2,
    normalise: bool = False,
    epsilon: float = 1e-4,
) -> Algorithm:
    """REINFORCE Leave-One-Out (Back to Basics: Revisiting REINFORCE Style Optimization, arXiv 2402.14740, 2024).

    The baseline is the mean reward of the prompt's other responses, which is unbiased. A whole response is one action.

        R_i = r_i - kl_coefficient sum_t (logp_behaviour - logp_ref),    A_i = R_i - 1/(G-1) sum_{j != i} R_j
        loss = -1/N sum_i A_i sum_t log pi(a_t)

    loss: "policy_gradient" is the paper's; "sequence_clip" is TRL's, mean -min(A S, A clip(S, 1 - e, 1 + e)) with
    e = clip_range and S the product of the response's token ratios; "token_clip" is verl's, with token ratios and a
    token mean. normalise: (A - mean) / (std + epsilon) over the batch (an option of TRL). TRL's kl_coefficient is 0.05.
    The advantage of a group of one is 0 (verl's loop version: its reward).

    Defaults. Paper: kl_coefficient, loss, normalise. Code: clip_range, epsilon.
    """
    require_choice("loss", loss, ("policy_gradient", "sequence_clip", "token_clip"))
    clipped = clip(clip_range, clip_range)
    objective = {
        "policy_gradient": policy_gradient(token_ratio(), log_probability(), sequence_sum()),
        "sequence_clip": policy_gradient(sequence_ratio(mean=False), clipped, sequence_mean()),
        "token_clip": policy_gradient(token_ratio(), clipped, token_mean()),
    }[loss]

    return Algorithm(with_kl_reward(kl_coefficient, on_actions(leave_one_out(normalise, epsilon))), objective)


@part
def above_greedy(gamma: float, reward_clip: float | None) -> Callable[[Trajectories], Trajectories]:
    """A function of the batch that writes the advantages of `remax`."""

    def advantage(batch: Trajectories) -> Trajectories:
        r = jnp.nan_to_num(batch.scores - batch.need("greedy_reward"))
        r = r if reward_clip is None else jnp.clip(r, -reward_clip, reward_clip)
        left = jnp.maximum(batch.lengths[:, None] - 1 - batch.action_index, 0.0)
        own = 0.0 if batch.token_rewards is None else batch.token_rewards
        scored = batch.action_mask & ~jnp.isnan(batch.scores)[:, None]
        return batch.replace(advantages=jnp.where(scored, jnp.power(gamma, left) * r[:, None] + own, 0.0))

    return advantage


@presets(
    paper={"gamma": 1.0, "reward_clip": None, "average": "sum"},
    code={"gamma": 0.99, "reward_clip": 5.0, "average": "token"},
)
def remax(
    gamma: float = 1.0,
    kl_coefficient: float = 0.05,
    reward_clip: float | None = None,
    average: AverageName = "sum",
) -> Algorithm:
    """ReMax (A Simple, Effective, and Efficient RL Method for Aligning LLMs, arXiv 2310.10505, 2023).

    The baseline is the reward of the same policy's greedy response to the prompt: no critic, no group.

        A_t = gamma^(T - t) clip(r - r_greedy, -c, c) - kl_coefficient (logp_behaviour - logp_ref)_t,    t = 1..T
        loss = -1/N sum_i sum_t A_t log pi(a_t)

    c = reward_clip; None: no bound. As in the released code, each token has its own KL term, not the sum over later
    tokens. That code (preset "code") also has gamma 0.99, c = 5, and a token mean where the paper sums; its power of
    gamma is one higher (gamma^1 on the last token), which is not done here.
    Rollout: one greedy completion per prompt, with the sampling weights.

    Defaults. Paper: gamma, reward_clip, average. Code: kl_coefficient.
    """
    check_number("gamma", gamma, least=0, most=1)
    check_number("reward_clip", reward_clip, above=0, or_none=True)

    transform = with_kl_reward(kl_coefficient, stateless(above_greedy(gamma, reward_clip), needs={"greedy_reward"}))
    return Algorithm(transform, averaged_gradient(log_probability(), average))


def opo(average: AverageName = "sum") -> Algorithm:
    """On-Policy RL with Optimal reward baseline (OPO, arXiv 2505.23585, 2025).

    The constant baseline of minimal variance is E[|grad log pi|^2 r] / E[|grad log pi|^2]. If token gradients are
    orthogonal and of equal norm, the squared norm of a response's gradient is proportional to its length:

        b_g = sum_i |o_i| r_i / sum_i |o_i|,    A_i = r_i - b_g,    loss = -1/N sum_i A_i sum_t log pi(a_t)

    One update per batch, no KL, no entropy bonus. Since sum_i |o_i| A_i = 0, an average that weights all tokens equally
    ("sum", or verl's "token") balances positive and negative tokens; "sequence" does not. In a group of one the formula
    gives advantage 0; verl has b = 0 there.

    Defaults. Paper: average.
    """
    transform = group_relative(scale="none", baseline="weighted", weights=row_lengths)
    return Algorithm(transform, averaged_gradient(log_probability(), average))


@part
def rescaled_to_informative(scale: Scale, epsilon: float, counted_by: str) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the advantages of `gpg`."""

    def advantage(batch: Trajectories) -> jax.Array:
        r = batch.scores
        known = ~jnp.isnan(r)
        valid = known & (~uniform_groups(batch) if counted_by == "variance" else r != 0)
        alpha = jnp.sum(known) / jnp.maximum(jnp.sum(valid), 1)
        return alpha * group_advantage(r, batch.group, scale=scale, epsilon=epsilon)

    return advantage


def gpg(
    scale: Scale = "none",
    epsilon: float = 1e-6,
    counted_by: Literal["variance", "nonzero"] = "variance",
    resample: bool = False,
) -> Algorithm:
    """Group Policy Gradient (GPG: A Simple and Strong Reinforcement Learning Baseline, arXiv 2504.02546, 2025).

    The policy gradient with the group mean as baseline, rescaled for the samples that carry no gradient:

        A_i = alpha (r_i - mean_g) / F,    alpha = B / (B - M),    loss = -sum A log pi(a_t) / tokens

    M of the batch's B responses are in groups of equal rewards. F is 1 (scale "none") or the group's standard deviation
    + epsilon ("std"). counted_by "variance" is this definition; with "nonzero" B - M counts the responses whose reward
    is not 0, as in verl, which differs from it. resample: replace groups without variance by sampling more prompts (the
    paper does so when the share of valid samples is below 0.6).

    Defaults. Paper: scale, counted_by. Code: epsilon. Ours: resample.
    """
    require_choice("counted_by", counted_by, ("variance", "nonzero"))
    require_choice("scale", scale, SCALES)

    objective = policy_gradient(token_ratio(), log_probability(), token_mean())
    curriculum = DynamicSampling(mixed_groups) if resample else None
    return Algorithm(on_actions(rescaled_to_informative(scale, epsilon, counted_by)), objective, curriculum)


def optimal_token_baseline(zero_tail: bool = True, corrected: bool = False, epsilon: float = 1e-8) -> Algorithm:
    """Optimal Token Baseline (OTB, Variance Reduction for Long-Horizon LLM-RL, arXiv 2602.07078, 2026).

    One baseline per group and token index t, weighted by the squared gradient norm accumulated up to t:

        w_it = 1 - 2 pi(a_t) + sum_v pi(v)^2,    W_it = sum_{s <= t} w_is
        B_t = sum_i G_it W_it / (sum_i W_it + epsilon),    A_it = G_it - B_t,    loss = -1/N sum_i sum_t A log pi(a_t)

    over the group's responses with at least t actions, G the reward-to-go, pi the policy before the update. w is the
    squared norm of the gradient with respect to the logits. The index t counts actions over all turns. zero_tail: B = 0
    where a single response is left, whose baseline would be its own return (verl since 2026, and its multi-turn
    version).
    corrected: multiplies w by (pi_old / pi_behaviour)^2. A group of one has B = 0.

    Defaults. Code: zero_tail, corrected, epsilon.
    """
    objective = policy_gradient(token_ratio(), log_probability(), sequence_sum())
    return Algorithm(energy_weighted_baseline(zero_tail, corrected, epsilon), objective)


def averaged_gradient(surrogate: Surrogate, average: AverageName) -> Objective:
    """The policy gradient with token ratios and an average given by name (`average_by_name`)."""
    return policy_gradient(token_ratio(), surrogate, average_by_name(average))


def with_kl_reward(coefficient: float, *rest: Transform) -> Transform:
    """Chain the transforms, after a per-token penalty on the log-ratio to the reference unless the coefficient is 0."""
    return chain(*rest) if is_off(coefficient) else chain(kl_reward(coefficient), *rest)


def _total_reward(batch: Trajectories) -> jax.Array:
    """The total reward of each row, its score plus its token rewards, f32[N]; NaN where not scored."""
    return jnp.where(jnp.isnan(batch.scores), jnp.nan, jnp.sum(terminal_rewards(batch), axis=1))
