"""REINFORCE and its kin: the score of what was sampled times how much better than a baseline it was; no critic."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.baselines import above_baseline
from jaxrl_llm.advantages.group import SCALES, group_advantage, group_relative, on_actions, standardised, uniform_groups
from jaxrl_llm.advantages.returns import discounted_returns, kl_reward, terminal_rewards
from jaxrl_llm.advantages.token_baselines import energy_weighted_baseline
from jaxrl_llm.algorithms.algorithm import Algorithm, Resample
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import is_off, require_choice
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
from jaxrl_llm.objectives.averages import average_by_name
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import Objective, Transform, chain, stateless

__all__ = ["gpg", "opo", "optimal_token_baseline", "reinforce", "remax", "rloo"]


def reinforce(
    baseline: str = "batch",
    gamma: float = 1.0,
    average: str = "sum",
    importance_cap: float | None = None,
) -> Algorithm:
    """REINFORCE (Simple statistical gradient-following algorithms, Machine Learning 8, 1992; before arXiv).

    The base case: raise the log-probability of what was sampled in proportion to its return above a baseline.

        G_t = sum_{s >= t} gamma^(s - t) r_s,    A_t = G_t - b,    loss = -1/N sum_i sum_t A_t log pi(a_t)

    baseline: b, "batch" the mean score of the batch, "group" that of the prompt's samples, "leave_one_out" that of the
    prompt's others, or "none". gamma: discount per token, with the score on the last one. average: "sum" (the gradient
    of the sequence's log-probability), "token", "sequence" (each by its own length), or another of `average_by_name`.
    importance_cap: weigh each token by min(pi / pi_behaviour, cap) under stop-gradient, for data that are not
    on-policy; None: do not.
    """
    require_choice("baseline", baseline, ("batch", "group", "leave_one_out", "none"))
    check_number("importance_cap", importance_cap, above=0, or_none=True)
    cap = None if importance_cap is None else lambda ratio, _: jnp.minimum(ratio, importance_cap)
    objective = averaged_gradient(log_probability(cap), average)

    def subtract(batch: Trajectories) -> Trajectories:
        keys = jnp.zeros_like(batch.group) if baseline == "batch" else batch.group
        kind = baseline if baseline in ("leave_one_out", "none") else "mean"
        r = batch.scores
        b = jnp.nan_to_num(r) - above_baseline(r, keys, kind)
        shifted = batch.need("advantages") - jnp.where(jnp.isnan(r), 0.0, b)[:, None]
        return batch.replace(advantages=jnp.where(batch.action_mask, shifted, 0.0))

    return Algorithm(chain(discounted_returns(gamma), stateless(subtract)), objective)


def rloo(
    kl_coefficient: float = 0.03,
    loss: str = "policy_gradient",
    clip_range: float = 0.2,
    normalize: bool = False,
    epsilon: float = 1e-4,
) -> Algorithm:
    """REINFORCE Leave-One-Out (Back to Basics: Revisiting REINFORCE Style Optimization, arXiv 2402.14740, 2024).

    The baseline is the mean of the OTHER responses to the prompt: without bias. A response is one action.

        R_i = r_i - kl_coefficient sum_t (logp_behaviour - logp_ref),    A_i = R_i - 1/(G-1) sum_{j != i} R_j
        loss = -1/N sum_i A_i sum_t log pi(a_t)

    loss: "policy_gradient" is the paper's; "sequence_clip" TRL's, the mean of -min(A S, A clip(S, 1 - e, 1 + e)) with
    e = clip_range and S the product of the response's token ratios; "token_clip" verl's, with token ratios and the mean
    over tokens. normalize: (A - mean) / (std + epsilon) over the batch (TRL's option). A group of one has advantage 0.
    """
    require_choice("loss", loss, ("policy_gradient", "sequence_clip", "token_clip"))
    clipped = clip(clip_range, clip_range)
    objective = {
        "policy_gradient": policy_gradient(token_ratio(), log_probability(), sequence_sum()),
        "sequence_clip": policy_gradient(sequence_ratio(mean=False), clipped, sequence_mean()),
        "token_clip": policy_gradient(token_ratio(), clipped, token_mean()),
    }[loss]

    def advantage(batch: Trajectories) -> jax.Array:
        R = _earned(batch)
        A = above_baseline(R, batch.group, "leave_one_out")
        return standardised(jnp.where(jnp.isnan(R), jnp.nan, A), epsilon=epsilon) if normalize else A

    return Algorithm(with_kl_reward(kl_coefficient, on_actions(advantage)), objective)


def remax(
    gamma: float = 1.0,
    kl_coefficient: float = 0.05,
    reward_clip: float | None = None,
    average: str = "sum",
) -> Algorithm:
    """ReMax (A Simple, Effective, and Efficient RL Method for Aligning LLMs, arXiv 2310.10505, 2023).

    The baseline is the reward of the greedy response of the same policy to the prompt: no critic, no group.

        A_t = gamma^(T - t) clip(r - r_greedy, -c, c) - kl_coefficient (logp_behaviour - logp_ref)_t,    t = 1..T
        loss = -1/N sum_i sum_t A_t log pi(a_t)

    c = reward_clip, None: no bound. The KL term is a token's own, not the sum over later ones. The released code has
    gamma 0.99, one more power of it, and the mean over tokens: average "token", for "sum" of the paper.
    Rollout: one greedy completion for each prompt, with the weights that sampled.
    """
    check_number("gamma", gamma, least=0, most=1)
    check_number("reward_clip", reward_clip, above=0, or_none=True)

    def advantage(batch: Trajectories) -> Trajectories:
        r = jnp.nan_to_num(batch.scores - batch.need("greedy_reward"))
        r = r if reward_clip is None else jnp.clip(r, -reward_clip, reward_clip)
        left = jnp.maximum(batch.lengths[:, None] - 1 - batch.action_index, 0.0)
        own = 0.0 if batch.token_rewards is None else batch.token_rewards
        scored = batch.action_mask & ~jnp.isnan(batch.scores)[:, None]
        return batch.replace(advantages=jnp.where(scored, jnp.power(gamma, left) * r[:, None] + own, 0.0))

    transform = with_kl_reward(kl_coefficient, stateless(advantage, needs={"greedy_reward"}))
    return Algorithm(transform, averaged_gradient(log_probability(), average))


def opo(average: str = "sum") -> Algorithm:
    """On-Policy RL with Optimal reward baseline (OPO, arXiv 2505.23585, 2025).

    The constant baseline of least variance is E[|grad log pi|^2 r] / E[|grad log pi|^2]. With token gradients that are
    orthogonal and equally long, the squared norm of a response is in proportion to its length:

        b_g = sum_i |o_i| r_i / sum_i |o_i|,    A_i = r_i - b_g,    loss = -1/N sum_i A_i sum_t log pi(a_t)

    One update per batch, no KL, no entropy. average: "sum", or "token" (both balance the mass of tokens pushed
    up and down), or "sequence", which does not. A group of one has advantage 0 (the formula; b = 0 in verl).
    """
    transform = group_relative(scale="none", baseline="weighted", weights=lambda batch: batch.lengths)
    return Algorithm(transform, averaged_gradient(log_probability(), average))


def gpg(scale: str = "none", epsilon: float = 1e-6, counted_by: str = "variance", resample: bool = False) -> Algorithm:
    """Group Policy Gradient (GPG: A Simple and Strong Reinforcement Learning Baseline, arXiv 2504.02546, 2025).

    The policy gradient with the group's mean as baseline, made up for the samples that carry no gradient:

        A_i = alpha (r_i - mean_g) / F,    alpha = B / (B - M),    loss = -sum A log pi(a_t) / tokens

    M of the batch's B responses are in groups of equal rewards. F is 1 (scale "none") or the group's standard deviation
    + epsilon ("std"). counted_by: "variance" as defined; "nonzero" takes the responses with a reward other than 0 for
    B - M, as verl does. resample: sample further prompts in place of groups without variance (the paper does so below
    a share of 0.6 of valid samples).
    """
    require_choice("counted_by", counted_by, ("variance", "nonzero"))
    require_choice("scale", scale, SCALES)

    def advantage(batch: Trajectories) -> jax.Array:
        r = batch.scores
        known = ~jnp.isnan(r)
        valid = known & (~uniform_groups(batch) if counted_by == "variance" else r != 0)
        alpha = jnp.sum(known) / jnp.maximum(jnp.sum(valid), 1)
        return alpha * group_advantage(r, batch.group, scale=scale, epsilon=epsilon)

    objective = policy_gradient(token_ratio(), log_probability(), token_mean())
    curriculum = Resample(informative=lambda batch: ~uniform_groups(batch)) if resample else None
    return Algorithm(on_actions(advantage), objective, curriculum)


def optimal_token_baseline(zero_tail: bool = True, corrected: bool = False, epsilon: float = 1e-8) -> Algorithm:
    """Optimal Token Baseline (OTB, technical report by the authors of the rollout-mismatch series, 2025; no arXiv id).

    A baseline for each number of generated tokens t, weighted by the gradient energy gathered up to there:

        w_it = 1 - 2 pi(a_t) + sum_v pi(v)^2,    W_it = sum_{s <= t} w_is
        B_t = sum_i G_it W_it / (sum_i W_it + epsilon),    A_it = G_it - B_t,    loss = -1/N sum_i sum_t A log pi(a_t)

    over the group's responses with t actions, G the reward-to-go, pi of the weights before the update. The t-th action
    is counted over all turns. zero_tail: B = 0 where only one response is left, whose own return would be its baseline
    (newer verl; older: False). corrected: w times (pi_old / pi_behaviour)^2. A group of one has B = 0.
    """
    objective = policy_gradient(token_ratio(), log_probability(), sequence_sum())
    return Algorithm(energy_weighted_baseline(zero_tail, corrected, epsilon), objective)


def averaged_gradient(surrogate: Surrogate, average: str) -> Objective:
    """The policy gradient with token ratios, by the name of an average (`objectives.averages.average_by_name`)."""
    mean, refresh = average_by_name(average)
    return policy_gradient(token_ratio(), surrogate, mean, refresh=refresh)


def with_kl_reward(coefficient: float, *rest: Transform) -> Transform:
    """The transforms after a penalty of each token's log-ratio to the reference, unless the coefficient is off."""
    return chain(*rest) if is_off(coefficient) else chain(kl_reward(coefficient), *rest)


def _earned(batch: Trajectories) -> jax.Array:
    """All that a row earns: its score and the rewards of its tokens, f32[N]; NaN where it is not scored."""
    return jnp.where(jnp.isnan(batch.scores), jnp.nan, jnp.sum(terminal_rewards(batch), axis=1))
