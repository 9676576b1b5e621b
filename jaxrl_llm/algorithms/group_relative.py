"""GRPO: the baseline is the other samples of the same prompt."""

from __future__ import annotations

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import is_off
from jaxrl_llm.objectives import clip, entropy, kl, policy_gradient, sequence_mean, token_ratio

__all__ = ["grpo"]


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
    entropy_coefficient: float = 0.0,
    scale: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, 2024).

    A_i = (r_i - mean_g) / (std_g + epsilon), on every token of sample i of group g, and with rho the token's ratio

        loss = -1/G sum_i 1/|o_i| sum_t [min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - beta k3]

    averaged over the groups, k3 = exp(-l) - 1 + l with l = logp - logp_ref, beta = kl_coefficient (paper: 0.04; at 0 no
    reference policy is loaded). entropy_coefficient >= 0 subtracts that much of the mean entropy. scale "none" leaves
    out the division by the standard deviation. The paper does not say which standard deviation; ddof 1 is common.
    """
    average = sequence_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average)
    if not is_off(kl_coefficient):
        objective += kl_coefficient * kl(to="reference", estimator="k3", average=average)
    if not is_off(entropy_coefficient):
        objective -= entropy_coefficient * entropy(average)
    return Algorithm(transform=group_relative(scale, ddof, epsilon), objective=objective)
