"""Objectives other than the mean reward: its logarithm, the maximum of k, diverse sets, risk measures of the score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax

from jaxrl_llm.advantages.group import group_relative, margin_over_second, on_actions
from jaxrl_llm.advantages.risk import bundled_risk
from jaxrl_llm.advantages.sets import DIVERSITIES, best_of_sets_advantage, diverse_sets_advantage
from jaxrl_llm.advantages.votes import answer_keys
from jaxrl_llm.algorithms.score_function import averaged_gradient
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.utils.errors import require_choice

__all__ = ["maxrl", "passk_grpo", "polychromic", "riskpo"]


def maxrl(
    epsilon: float = 1e-6, clip_low: float = 0.2, clip_high: float = 0.2, average: AverageName = "token"
) -> Algorithm:
    """Maximum Likelihood Reinforcement Learning (MaxRL, arXiv 2602.02710, 2026).

    Maximises log p(success) = -sum_k (1 - p)^k / k instead of p; a group of N samples gives a truncated series:

        A_i = (r_i - mean_g) / (mean_g + epsilon)

    for non-negative rewards; the advantage of a rare success is up to N - 1. A group of one, and one whose mean is not
    positive, has advantage 0. Since groups without a success contribute nothing, the expected gradient is that of the
    series up to N - 1, (1 - (1 - p)^(N-1)) / p times grad p; the paper's estimator without the control variate has N.
    The loss is PPO's clip (clip_low, clip_high), which on-policy has the policy gradient, averaged by `average`
    ("token" in the public forks).

    Defaults. Code: epsilon, clip_low, clip_high, average.
    """
    objective = averaged_gradient(clip(clip_low, clip_high), average)
    return Algorithm(group_relative(scale="mean", epsilon=epsilon), objective)


@part
def best_of_sets_credit(
    k: int, estimator: str, scale: Literal["std", "none"], epsilon: float
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the advantages of `passk_grpo`."""

    def advantage(batch: Trajectories) -> jax.Array:
        r, group = batch.scores, batch.group
        if estimator == "margin":
            divisor = bucket_moments(group, r)[2] + epsilon if scale == "std" else 1.0
            return margin_over_second(r, group) / divisor
        how = "unbiased" if estimator == "unbiased" else scale
        return best_of_sets_advantage(r, group, k, how, epsilon)

    return advantage


def passk_grpo(
    k: int = 4,
    estimator: Literal["subsets", "unbiased", "margin"] = "subsets",
    scale: Literal["std", "none"] = "std",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    epsilon: float = 1e-6,
    average: AverageName = "token",
) -> Algorithm:
    """Pass@k training (Pass@k Training for Balancing Exploration and Exploitation, arXiv 2508.10751, 2025).

    The reward of a set is that of its best member, which preserves exploration. For the C(n, k) sets of k responses of
    a group of n, f(S) = max_S r; E_i is the mean of f over the sets that contain i, E over all sets, sigma the standard
    deviation over all sets. estimator:

        "subsets"   A_i = (E_i - E) / (sigma + epsilon): the paper's for rewards 0 and 1, extended to any rewards;
                    k = 1 is GRPO with the population standard deviation
        "unbiased"  A_i = k (E_i - E[max of k others]), the gradient of pass@k (PKPO, arXiv 2505.15201): its k/n E_i,
                    times n because the loss is averaged over responses, with a leave-one-out baseline; k = 1 is RLOO
        "margin"    the best response's reward minus the second best, / (std + epsilon) of the group's rewards, for
                    the best one; 0 for the others (arXiv 2503.19595; k is not used)

    scale "none" leaves out the divisions. Groups of at most k responses use sets of n - 1, where the paper has
    advantage 0. The loss is PPO's clip (clip_low, clip_high) without KL; average as in `grpo` ("token" is verl's, for
    which both released estimators are written).

    Defaults. Paper: k, estimator, scale. Code: clip_low, clip_high, epsilon, average.
    """
    require_choice("estimator", estimator, ("subsets", "unbiased", "margin"))
    require_choice("scale", scale, ("std", "none"))

    return Algorithm(
        on_actions(best_of_sets_credit(k, estimator, scale, epsilon)),
        averaged_gradient(clip(clip_low, clip_high), average),
    )


@part
def diverse_sets_credit(
    set_size: int, diversity: Literal["share", "share_or_zero", "zero_based"]
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the advantages of `polychromic`."""

    def advantage(batch: Trajectories) -> jax.Array:
        return diverse_sets_advantage(batch.scores, answer_keys(batch), batch.group, set_size, diversity)

    return advantage


def polychromic(
    set_size: int = 4,
    diversity: Literal["share", "share_or_zero", "zero_based"] = "share",
    kl_coefficient: float = 0.005,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Polychromic Objectives for Reinforcement Learning (Poly-PPO, arXiv 2509.25424, 2025).

    The reward is that of a set of n samples of the prompt, its mean reward times its diversity, shared by its members:

        f(S) = mean_S r * d(S),    A_i = mean of f over the sets with i - mean of f over all sets

    over all sets of n = set_size responses of the group, in closed form (the paper samples sets). diversity: "share", d
    is the number of distinct answers / n; "share_or_zero", the same but 0 where all members agree, as in replications;
    "zero_based", (distinct - 1) / (n - 1). Answers are compared by info["answer_key"] int32[N], or, without it, by
    their tokens. With rho the token's ratio and l = log rho, the loss is

        mean over tokens of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient (rho - 1 - l)

    whose last term estimates the paper's KL(behaviour || pi) without bias. The paper's coefficient and average are not
    known to us; replications use 0.005 to 0.1. Rewards such as number_match give the answers. With a single turn the
    prompt is the only state, so the group plays the role of the paper's vine rollouts (8 from each visited state).

    Defaults. Paper: set_size, diversity. Code: kl_coefficient. Ours: clip_low, clip_high.
    """
    require_choice("diversity", diversity, DIVERSITIES)
    average = token_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average)
    objective += kl_coefficient * kl(to="behaviour", estimator="k3", average=average, reverse=True)

    return Algorithm(on_actions(diverse_sets_credit(set_size, diversity), {"answer_key"}), objective)


def riskpo(
    alpha: float = 0.2,
    beta: float = 0.8,
    tail_weight: float = 1.5,
    bundle_size: int = 5,
    quantiles: Literal["batch", "mix", "track"] = "track",
    quantile_rate: float = 0.1,
    credit: Literal["score", "std", "sum_mean", "uniform"] = "std",
    natural_baseline: bool = False,
    risk: Literal["mixed", "seeking"] = "mixed",
    ragged: Literal["repeat", "smallest"] = "repeat",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    average: AverageName = "token",
) -> Algorithm:
    """Risk-based Policy Optimization (RiskPO, arXiv 2510.00911, 2025).

    Maximises a risk measure of the score with more weight on the tail below its alpha-quantile a, and none above its
    beta-quantile b. Scores X_j are sums over bundles of bundle_size prompts, with one response to each:

        A_j = (w g_C + g_R) / (w + 1) / std X,    g_C = -max(a - X, 0) / alpha,    w = tail_weight
        g_R = (max(X - a, 0) - max(X - b, 0) + c) / (beta - alpha),    c = a - b if natural_baseline else 0

    risk "seeking" has max(X - b, 0) / (1 - beta) in place of g_C. credit, the advantage of the response to question q:
    "uniform" A_j; "std" A_j / std_q; "score" 0.5 A_j if r > 0 else 1.5 A_j; "sum_mean" A_j d_q / sum_q d_q,
    d = r - mean_q (which diverges where the d_q nearly cancel). quantiles: "track" updates
    q <- q + quantile_rate (level - share of X < q) after each batch; "batch" uses those of the bundle's own X, to which
    the released "track" reduces; "mix" the mean of both. ragged, for groups of different sizes: as many X as the
    largest has responses ("repeat" cycles through the others) or as the smallest ("smallest"; the rest gets 0). A
    constant X has std 1. Bundles: info["bundle"] int32[N], or consecutive prompt ids. The loss is PPO's clip (clip_low,
    clip_high) without KL; average as in `grpo`.

    Defaults are those of the authors' script for DAPO-math, except credit, which is from the one for MATH (where beta
    is 0.9, with natural_baseline); both use verl's token mean.

    Defaults. Paper: risk. Code: alpha, beta, tail_weight, bundle_size, quantiles, quantile_rate, credit,
    natural_baseline, clip_low, clip_high, average. Ours: ragged.
    """
    transform = bundled_risk(
        risk, alpha, beta, tail_weight, bundle_size, quantiles, quantile_rate, credit, natural_baseline, ragged
    )
    return Algorithm(transform, averaged_gradient(clip(clip_low, clip_high), average))
