"""Losses that weight the score function by the ratio, or gate the ratio smoothly, instead of PPO's clip."""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages.group import drop_uniform_groups, group_relative
from jaxrl_llm.algorithms.run_settings import run_settings, several_steps
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scale
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import constant, sequence_mean, token_mean
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import log_probability, soft_gate
from jaxrl_llm.objectives.weights import by_sign, capped, clipped, product, within_divergence

__all__ = ["cispo", "dispo", "dppo", "sapo_soft_adaptive"]


def cispo(
    clip_low: float = 1.0, clip_high: float = 4.0, scale: Scale = "std", ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """Clipped IS-Weight Policy Optimization (MiniMax-M1, arXiv 2506.13585, 2025).

    The clipped ratio is a weight under stop-gradient, so that no token loses its gradient:

        loss = -1/T sum_i sum_t sg(clip(rho, 1 - clip_low, 1 + clip_high)) A_i logp_it

    over the T tokens of the batch, A as in `grpo` (scale, ddof, epsilon). The paper has no effective lower bound, which
    is clip_low = 1, and does not print clip_high; 4 gives the cap of 5 in TRL's settings for ScaleRL (2510.13786).
    TRL's epsilon_high is the cap itself; verl's is clip_high, and its default clip_low of 0.2 is an effective bound.

    Defaults. Paper: clip_low, scale. Code: clip_high, ddof, epsilon.
    """
    objective = policy_gradient(token_ratio(), log_probability(clipped(clip_low, clip_high)), token_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)


@run_settings(several_steps("several gradient steps on a batch: at the first all ratios are 1"))
def dispo(
    positive_low: float = 0.2,
    positive_high: float = 10.0,
    negative_low: float = 1.0,
    negative_high: float = 100.0,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Decoupled Importance-Sampling Weight Clipping (DISPO, arXiv 2602.00983, 2026).

    CISPO with separate bounds for correct and wrong responses: w = clip(rho, 1 - positive_low, 1 + positive_high) where
    A > 0, clip(rho, 1 - negative_low, 1 + negative_high) where A < 0,

        loss = -1/T sum_i sum_t sg(w_it) A_i logp_it,   A_i = (r_i - mean_g) / (std_g + epsilon)

    over the T tokens of groups whose rewards differ. The paper does not say which standard deviation (ddof).

    Defaults. Paper: positive_low, positive_high, negative_low, negative_high. Ours: ddof, epsilon.
    """
    weight = by_sign(clipped(positive_low, positive_high), clipped(negative_low, negative_high))
    objective = policy_gradient(token_ratio(), log_probability(weight), token_mean())
    return Algorithm(chain(drop_uniform_groups(), group_relative(ddof=ddof, epsilon=epsilon)), objective)


def dppo(
    divergence: Literal["kl", "tv"] = "tv",
    threshold_low: float | None = None,
    threshold_high: float | None = None,
    cap: float = 20.0,
    max_length: int | None = None,
) -> Algorithm:
    """Divergence Proximal Policy Optimization (Rethinking the Trust Region, arXiv 2602.04879, 2026).

    Masks a token once its probability, rather than its ratio, has moved too far in the direction of its advantage, so
    that rare tokens can become likely. With p, p0 its current and behaviour probability, A_i = r_i - mean_g,

        keep = p - p0 <= threshold_high where A > 0,  p0 - p <= threshold_low where A < 0      (divergence "tv")
        loss = -1/N sum_i 1/max_length sum_t keep sg(min(rho, cap)) A_i logp_it

    divergence "kl": the same with the binary KL(p0 || p) of sampling the token or not. A threshold of None is 0.15 for
    "tv" and 0.05 for "kl". max_length: the generation budget; None: the longest row of the batch. These divergences use
    only the sampled token and are lower bounds of the full ones; the paper's top-K forms are not implemented.

    Defaults. Paper: divergence. Code: threshold_low, threshold_high, cap. Run: max_length.
    """
    usual = 0.15 if divergence == "tv" else 0.05
    low, high = (usual if bound is None else bound for bound in (threshold_low, threshold_high))
    weight = product(within_divergence(low, high, divergence), capped(cap))
    objective = policy_gradient(token_ratio(), log_probability(weight), constant(max_length))
    return Algorithm(group_relative("none"), objective)


def sapo_soft_adaptive(
    positive_temperature: float = 1.0,
    negative_temperature: float = 1.05,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Soft Adaptive Policy Optimization (SAPO, arXiv 2511.20347, 2025).

    Replaces the clip of the token's ratio by a sigmoid gate, with tau = positive_temperature where A > 0, else
    negative_temperature, which is higher so that negative gradients decay faster off-policy:

        loss = -1/N sum_i 1/|o_i| sum_t (4 / tau) sigmoid(tau (rho - 1)) A_i

    At rho = 1 the gradient is GRPO's, with its A (scale, ddof, epsilon), and the gate is 2 / tau. No KL.

    Defaults. Paper: positive_temperature, negative_temperature, scale. Code: ddof, epsilon.
    """
    objective = policy_gradient(token_ratio(), soft_gate(positive_temperature, negative_temperature), sequence_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)
