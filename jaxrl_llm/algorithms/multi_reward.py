"""Methods for several rewards, or many checks, of one completion.

`weights` is a text such as "correct=1,format=0.5" with the names of reward components; components that it does not name
have weight 1. A batch without components has a single one, its reward.
"""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages.multi_reward import check_credit, decoupled, variance_weighted
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio

__all__ = ["dvao", "gdpo", "verpo"]


@presets(
    paper={"normalise": "sequences", "average": "sequence"},
    code={"normalise": "tokens", "epsilon": 1e-6, "batch_epsilon": 1e-8, "average": "token"},
)
def gdpo(
    weights: str = "",
    normalise: Literal["none", "sequences", "tokens"] = "sequences",
    epsilon: float = 1e-4,
    batch_epsilon: float = 1e-4,
    ddof: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    average: AverageName = "sequence",
) -> Algorithm:
    """Group reward-Decoupled Normalization Policy Optimization (GDPO, arXiv 2601.05242, 2026).

    Each reward is normalised in its group before they are summed, so that different combinations of rewards keep
    different advantages; then the sum is normalised over the batch, so that its scale does not grow with their number:

        s_i = sum_k w_k (r_ik - mean_g r_k) / (std_g r_k + epsilon),  A_i = (s_i - mean s) / (std s + batch_epsilon)

    with ddof in both deviations. The loss is GRPO's with clip_low, clip_high, kl_coefficient (paper and code: 0) and
    average (see `objectives.averaging.averages.average_by_name`; the paper's formula has "sequence", the verl code
    "token").

    normalise: "sequences" counts each sequence once (paper, TRL code) and leaves a single component as it is (TRL code;
    the paper always has several); "tokens" is the verl code, in which each sequence counts by its length, the divisor
    is sqrt(var + batch_epsilon), a single component is normalised too, and the epsilons are 1e-6 and 1e-8 (preset
    "code"); "none" skips the step. Both codes count a component that did not score a row as 0; here it is ignored, also
    in its group's mean and deviation.

    Defaults. Paper: weights, normalise, kl_coefficient, average. Code: epsilon, batch_epsilon, ddof, clip_low,
    clip_high.
    """
    transform = decoupled(weights, normalise, ddof, epsilon, batch_epsilon)
    loss = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    return Algorithm(transform, loss.objective)


def dvao(
    weights: str = "",
    epsilon: float = 1e-6,
    ddof: int = 0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
    average: AverageName = "sequence",
) -> Algorithm:
    """Dynamic Variance-adaptive Advantage Optimization (DVAO, arXiv 2605.25604, 2026).

    The group-normalised advantages of the rewards are summed with weights proportional to w_k std_g r_k, so that the
    weight of a reward is its standard deviation in the group. In closed form

        A_i = sum_k w_k (r_ik - mean_g r_k) / (sum_l w_l std_g r_l + epsilon)

    which never divides by a small deviation; |A| is at most that of the weighted sum of rewards under GRPO.
    weights: only their proportions matter, so 1 each is the paper's 1/n. ddof 0 is the population deviation of the
    paper's propositions; 1 scales all advantages of a group by the same factor. The loss is GRPO's (clip_low,
    clip_high, kl_coefficient, average).

    Defaults. Paper: weights, ddof. Ours: epsilon, clip_low, clip_high, kl_coefficient, average.
    """
    loss = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    return Algorithm(variance_weighted(weights, ddof, epsilon), loss.objective)


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

    Besides full success, a program is rewarded for each test that it passes: more for tests that few of the group pass,
    and less for tests whose pass rate is shared by many, so that many easy tests do not dominate. With p_itj whether
    attempt t of row i passes test j, rho_j its mean over the attempts of the group, and S_i = gamma^attempts if the
    last attempt passes all tests, else 0,

        w_j = exp(-difficulty rho_j) / (sum_k exp(-(rho_j - rho_k)^2 / (2 width^2)) + epsilon)
        R_it = sum_j w_j p_itj,   A_it = S_i - mean_g S + partial (R_it - mean_g R)

    on the tokens of attempt t, in the clipped loss (clip_low, clip_high) averaged over tokens. The paper's values of
    difficulty (its alpha), width (sigma), partial (beta), gamma and epsilon (delta) were not available to us.

    info["tests"] has the tests, f32[N, U] for a single attempt or [N, K, U] for one attempt per turn (NaN: no such
    test): a reward function returns them as the entry "tests" beside its score. Without it the reward components,
    clipped to [0, 1], are the tests.

    Defaults. Ours: difficulty, width, partial, gamma, epsilon, clip_low, clip_high.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    return Algorithm(check_credit(difficulty, width, partial, gamma, epsilon), objective)
