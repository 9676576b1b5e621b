"""Objectives other than the mean reward: its logarithm, the best of k, sets that are diverse, tails of the score."""

from __future__ import annotations

import jax

from jaxrl_llm.advantages.baselines import margin_over_second
from jaxrl_llm.advantages.group import group_relative, on_actions
from jaxrl_llm.advantages.risk import bundled_risk
from jaxrl_llm.advantages.sets import DIVERSITIES, best_of_sets_advantage, diverse_sets_advantage
from jaxrl_llm.advantages.votes import answer_keys
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.score_function import averaged_gradient
from jaxrl_llm.errors import require_choice
from jaxrl_llm.grouping import bucket_moments
from jaxrl_llm.objectives import clip, kl, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.trajectory import Trajectories

__all__ = ["maxrl", "passk_grpo", "polychromic", "riskpo"]


def maxrl(epsilon: float = 1e-6, clip_low: float = 0.2, clip_high: float = 0.2, average: str = "token") -> Algorithm:
    """Maximum Likelihood Reinforcement Learning (MaxRL, arXiv 2602.02710, 2026).

    Raises log p(success) = -sum_k (1 - p)^k / k rather than p; N samples reach the terms up to k = N:

        A_i = (r_i - mean_g) / (mean_g + epsilon)

    for rewards that are not negative: rare successes count for as much as N - 1, and a prompt without any for nothing,
    which makes the expectation that of N - 1 terms, (1 - (1 - p)^(N-1)) / p times grad p. In PPO's clipped loss
    (clip_low, clip_high); on-policy it is the policy gradient. average: "token" as in the public code, "sequence", or
    "sum". A group of one, and one whose mean is not positive, has advantage 0.
    """
    objective = averaged_gradient(clip(clip_low, clip_high), average)
    return Algorithm(group_relative(scale="mean", epsilon=epsilon), objective)


def passk_grpo(
    k: int = 4,
    estimator: str = "subsets",
    scale: str = "std",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Pass@k training (Pass@k Training for Balancing Exploration and Exploitation, arXiv 2508.10751, 2025).

    A group earns as its best members do, not as their mean, so that it need not be sure of one way. Of the C(n, k) sets
    of k, f(S) = max_S r; E_i is its mean over those that contain i, E over all, sigma its deviation. estimator:

        "subsets"   A_i = (E_i - E) / (sigma + epsilon); for rewards 0 and 1 that of the paper, for others its
                    continuation; k = 1 is GRPO with the population standard deviation
        "unbiased"  A_i = k (E_i - E[max of k others]), the gradient of pass@k (PKPO, arXiv 2505.15201); k = 1 is RLOO.
                    Its own k/n E_i, times n as we average over responses, with the baseline that leaves i out
        "margin"    best minus second best for the best, 0 for the others, / (std + epsilon) of the group's rewards
                    (arXiv 2503.19595); for k = n

    scale "none" leaves out the divisions. Groups of no more than k use sets of n - 1, where the paper has advantage 0.
    In GRPO's clipped loss (clip_low, clip_high) without KL.
    """
    require_choice("estimator", estimator, ("subsets", "unbiased", "margin"))
    require_choice("scale", scale, ("std", "none"))

    def advantage(batch: Trajectories) -> jax.Array:
        r, group = batch.scores, batch.group
        if estimator == "margin":
            divisor = bucket_moments(group, r)[2] + epsilon if scale == "std" else 1.0
            return margin_over_second(r, group) / divisor
        how = "unbiased" if estimator == "unbiased" else scale
        return best_of_sets_advantage(r, group, k, how, epsilon)

    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(on_actions(advantage), objective)


def polychromic(
    set_size: int = 4,
    diversity: str = "share",
    kl_coefficient: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Polychromic Objectives for Reinforcement Learning (Poly-PPO, arXiv 2509.25424, 2025).

    What earns is a set of n samples of the prompt, by its mean reward times its diversity; each member gets the same:

        f(S) = mean_S r * d(S),    A_i = mean over the sets with i of f(S) - mean f

    over all sets of n = set_size of the group, in closed form (the paper draws some). diversity: "share", d the number
    of distinct answers / n, or "zero_based", (distinct - 1) / (n - 1). Answers are told apart by info["answer_key"]
    int32[N] where given, else by their tokens. The loss is PPO's clipped one (clip_low, clip_high), mean over tokens,
    plus kl_coefficient times 1/2 (logp - logp_behaviour)^2, near the behaviour policy KL(behaviour || pi); neither the
    average nor the coefficient was published. For one turn the prompt is the only state, and the paper's vines from
    visited states are the group (8 samples there).
    """
    require_choice("diversity", diversity, DIVERSITIES)
    average = token_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average)
    objective += kl_coefficient * kl(to="behaviour", estimator="k2", average=average)

    def advantage(batch: Trajectories) -> jax.Array:
        return diverse_sets_advantage(batch.scores, answer_keys(batch), batch.group, set_size, diversity)

    return Algorithm(on_actions(advantage), objective)


def riskpo(
    alpha: float = 0.2,
    beta: float = 0.8,
    tail_weight: float = 1.5,
    bundle_size: int = 5,
    quantiles: str = "track",
    quantile_rate: float = 0.1,
    credit: str = "std",
    natural_baseline: bool = False,
    risk: str = "mixed",
    ragged: str = "repeat",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Risk-based Policy Optimization (RiskPO, arXiv 2510.00911, 2025).

    Raises a risk measure of the score: what lies below its alpha-quantile a counts more, and above its beta-quantile b
    nothing is gained. Scores X_j are sums over bundles of bundle_size prompts, of a response to each:

        A_j = (w g_C + g_R) / (w + 1) / std X,    g_C = -max(a - X, 0) / alpha,    w = tail_weight
        g_R = (max(X - a, 0) - max(X - b, 0) + c) / (beta - alpha),    c = a - b if natural_baseline else 0

    risk "seeking" has max(X - b, 0) / (1 - beta) in place of g_C. credit, to the response of question q: "uniform" A_j;
    "std" A_j / std_q; "score" 0.5 A_j if r > 0 else 1.5 A_j; "sum_mean" A_j d_q / sum_q d_q, d = r - mean_q (it can
    explode where deviations nearly cancel). quantiles: "track" q <- q + quantile_rate (level - share of X < q) over
    training, used as they were before the batch; "batch" of the bundle's own X, which is what the released code does in
    effect; "mix" their mean. ragged: with groups of unlike size there are as many X as the largest has responses
    ("repeat", the others in turn) or as the smallest ("smallest"; the rest gets 0). Where X is constant std is 1.
    Defaults are those of the authors' script for DAPO-math, but credit, which is that for MATH (where beta is 0.9 and
    natural_baseline is on). In GRPO's clipped loss (clip_low, clip_high). Bundles: info["bundle"] int32[N], or
    consecutive prompt ids.
    """
    transform = bundled_risk(
        risk, alpha, beta, tail_weight, bundle_size, quantiles, quantile_rate, credit, natural_baseline, ragged
    )
    return Algorithm(transform, policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean()))
