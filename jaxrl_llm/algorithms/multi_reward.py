"""Methods for several rewards, or many checks, of one completion.

`weights` is a text such as "correct=1,format=0.5" over the names of the reward components; components that it does not
name count 1, and a batch without components has one, its reward.
"""

from __future__ import annotations

from jaxrl_llm.advantages.multi_reward import check_credit, decoupled, variance_weighted
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio

__all__ = ["dvao", "gdpo", "verpo"]


def gdpo(
    weights: str = "",
    normalise: str = "sequences",
    epsilon: float = 1e-4,
    ddof: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
) -> Algorithm:
    """Group reward-Decoupled Normalization Policy Optimization (GDPO, arXiv 2601.05242, 2026).

    Each reward is normalised in its group before they are summed, so that combinations of rewards keep their
    differences; then the sum is normalised over the batch, so that its scale does not depend on how many there are:

        s_i = sum_k w_k (r_ik - mean_g r_k) / (std_g r_k + epsilon),  A_i = (s_i - mean s) / (std s + epsilon)

    weights: of the components, "name=0.5,other=2", the others 1. The rest (clip_low, clip_high, kl_coefficient) is
    GRPO. normalise: "sequences" counts each sequence once (paper); "tokens" weighs it by its length and divides by
    sqrt(var + epsilon) (the released code for verl, with 1e-6 in the groups and 1e-8 in the batch); "none" leaves the
    step out, as does a single component. ddof: of both deviations. The code counts a component that did not score a
    row as 0; here it adds nothing and is left out of its group's mean.
    """
    transform = decoupled(weights, normalise, ddof, epsilon)
    return Algorithm(transform, grpo(clip_low, clip_high, kl_coefficient).objective)


def dvao(
    weights: str = "",
    epsilon: float = 1e-6,
    ddof: int = 0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
) -> Algorithm:
    """Dynamic Variance-adaptive Advantage Optimization (DVAO, arXiv 2605.25604, 2026).

    The group-normalised advantages of the rewards are summed with weights in proportion to w_k std_g r_k, so that a
    reward counts as much as it tells the samples of the group apart. In closed form

        A_i = sum_k w_k (r_ik - mean_g r_k) / (sum_l w_l std_g r_l + epsilon)

    which never divides by a small deviation; |A| is at most that of the weighted sum of rewards under GRPO.
    weights: of the components, "name=0.5,other=2", the others 1; only their proportions matter. ddof 0 is the
    population deviation of the paper's propositions (1 changes all advantages of a group by one factor). The rest
    (clip_low, clip_high, kl_coefficient) is GRPO.
    """
    return Algorithm(variance_weighted(weights, ddof, epsilon), grpo(clip_low, clip_high, kl_coefficient).objective)


def verpo(
    difficulty: float = 2.0,
    width: float = 0.1,
    partial: float = 0.5,
    gamma: float = 0.95,
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Verifiable Dense Reward Policy Optimization (VeRPO, arXiv 2601.03525, 2026).

    Besides full success, a program earns the tests that it passes: more for those that few of the group pass, and less
    where many tests have a like pass rate, so that a crowd of easy tests does not dominate. With p_itj whether attempt
    t of row i passes test j, rho_j its mean over the group, S_i = gamma^turns if the last attempt passes all, else 0,

        w_j = exp(-difficulty rho_j) / (sum_k exp(-(rho_j - rho_k)^2 / (2 width^2)) + epsilon)
        R_it = sum_j w_j p_itj,   A_it = S_i - mean_g S + partial (R_it - mean_g R)

    on the tokens of attempt t, in the clipped loss (clip_low, clip_high) averaged over tokens. The numbers difficulty,
    width, partial, gamma and epsilon are not the paper's, which were not known.

    Tests are info "tests", f32[N, U] of one attempt or [N, K, U] of one for each turn (NaN: no such test); without
    them the reward components, clipped to [0, 1], are the tests.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    return Algorithm(check_credit(difficulty, width, partial, gamma, epsilon), objective)
