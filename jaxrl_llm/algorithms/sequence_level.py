"""Ratios of whole sequences or turns instead of tokens."""

from __future__ import annotations

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.returns import clip_advantages, whiten_advantages
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.errors import require_choice
from jaxrl_llm.objectives.averages import sequence_mean, sequence_sum, token_mean
from jaxrl_llm.objectives.corrections import scale_by_info, sequence_factor
from jaxrl_llm.objectives.policy_gradient import policy_gradient, regularised
from jaxrl_llm.objectives.ratios import sequence_ratio, span_ratio, token_ratio
from jaxrl_llm.objectives.surrogates import clip, geometric_clip, log_probability
from jaxrl_llm.objectives.weights import by_sign, gamma, of_scaled_ratio
from jaxrl_llm.transform import chain

__all__ = ["gmpo", "gspo", "gspo_token", "luspo", "seeupo", "vespo"]


def gspo(
    clip_low: float = 3e-4, clip_high: float = 4e-4, scale: str = "std", ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """Group Sequence Policy Optimization (GSPO, arXiv 2507.18071, 2025).

    Ratio and clip are of the sequence, as the reward is: a response is kept or clipped as a whole. With GRPO's A_i
    (scale, ddof, epsilon as there) and s_i = exp(1/|o_i| sum_t (logp - logp_behaviour)),

        loss = -1/N sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    s is a geometric mean and so near 1: clip_low and clip_high are a thousandth of GRPO's. No KL. verl bounds the
    log-ratio at 10 from above.
    """
    objective = policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(group_relative(scale, ddof, epsilon), objective)


def gspo_token(
    clip_low: float = 3e-4, clip_high: float = 4e-4, scale: str = "std", ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """GSPO with Token-Level Advantages (GSPO, section GSPO-token, arXiv 2507.18071, 2025).

    As gspo, but each token has the value s_i and the gradient of its own log-probability,
    s_it = sg(s_i) exp(logp_it - sg(logp_it)), and is clipped by its own advantage:

        loss = -1/N sum_i 1/|o_i| sum_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)

    With GRPO's advantages (scale, ddof, epsilon), the same on all tokens, it is gspo exactly; it is for transforms that
    tell tokens apart.
    """
    objective = policy_gradient(sequence_ratio(gradient="token"), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(group_relative(scale, ddof, epsilon), objective)


def gmpo(
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    kl_coefficient: float = 0.0,
    scale: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Geometric-Mean Policy Optimization (GMPO, arXiv 2507.20673, 2025).

    The geometric mean of token ratios, each clipped in log space before the mean, where GSPO clips after it:

        d'_t = min(d_t, clip_high) where A > 0, max(d_t, -clip_low) where A < 0,   d = logp - logp_behaviour
        loss = -1/N sum_i A_i exp(1/|o_i| sum_t d'_t)

    clip_low and clip_high bound log-ratios, not 1 +- e. A as in grpo (scale, ddof, epsilon); kl_coefficient (paper: 0)
    times the sequence mean of k3. verl divides by |o_i| + 1e-8 and lets empty rows count.
    """
    average = sequence_mean()
    objective = policy_gradient(token_ratio(), geometric_clip(clip_low, clip_high), average)
    return Algorithm(
        group_relative(scale, ddof, epsilon), regularised(objective, average, kl_coefficient=kl_coefficient)
    )


def luspo(
    clip_low: float = 2e-3, clip_high: float = 2.5e-3, scale: str = "std", ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """Length-Unbiased Sequence Policy Optimization (LUSPO, arXiv 2602.05261, 2026).

    GSPO with each sequence's term multiplied by its length, so that a token of a long response weighs as much as one of
    a short response. With GRPO's A_i (scale, ddof, epsilon) and GSPO's s_i,

        loss = -1/N sum_i |o_i| min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The loss is about the mean length times GSPO's: mind the learning rate. The paper's N counts rows without an action
    too; here they count nowhere.
    """
    objective = policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_sum())
    return Algorithm(group_relative(scale, ddof, epsilon), objective)


def vespo(
    positive_power: float = 2.0,
    positive_decay: float = 3.0,
    negative_power: float = 3.0,
    negative_decay: float = 2.0,
    correction: str = "none",
    cap: float = 2.0,
    scale: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Variational Sequence-Level Soft Policy Optimization (VESPO, arXiv 2602.10693, 2026).

    A smooth weight of the whole sequence's ratio W_i = prod_t rho_it, not its mean, in place of a clip:

        phi(W) = W^k exp(lambda (1 - W)),   loss = -1/T sum_i sum_t sg(phi(W_i)) A_i logp_it

    T the tokens of the batch; (k, lambda) = (positive_power, positive_decay) where A >= 0, else (negative_power,
    negative_decay). phi(1) = 1, and phi is most at k / lambda. A as in grpo (scale, ddof, epsilon).
    correction "truncate" or "mask": W is that of current to old policy times the product of the tokens' old to
    behaviour weights, min(w, cap), or w where w <= cap and else 1e-8; "none": of current to behaviour. W is at least
    1e-8.
    """
    require_choice("correction", correction, ("none", "truncate", "mask"))
    weight = by_sign(gamma(positive_power, positive_decay), gamma(negative_power, negative_decay))
    ratio = sequence_ratio("behaviour" if correction == "none" else "old", mean=False)
    if correction != "none":
        weight = of_scaled_ratio(weight, lambda b: sequence_factor(b, correction, cap))
    objective = policy_gradient(ratio, log_probability(weight), token_mean())
    return Algorithm(group_relative(scale, ddof, epsilon), objective)


def seeupo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.002,
    limit: float = 3.0,
    ddof: int = 1,
) -> Algorithm:
    """Sequence-Level Sequential Update Policy Optimisation (SeeUPO, arXiv 2602.06554, 2026).

    The turns of an episode are agents that share weights and are updated one after the other, the last first. Here are
    credit and loss of one such phase: A_i = R_i - mean_g R without the group's deviation, standardised over the batch
    (ddof), within +-limit, times M_i; s the turn's geometric ratio with the gradient of each token by itself;

        loss = -1/N sum_i 1/|o_i| sum_t min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) + kl_coefficient mean k3

    Special rollout: per batch up to T_max phases, t = T_max..1, each with old_logp anew, weights on turn t alone, and
    info["turn_factor"] f32[N] = M_i, by which later turns changed (`objectives.corrections.compounded`; 1 when absent).
    Without phases all turns are updated at once. One turn: GSPO with batch-normalised advantages.
    """
    average = sequence_mean()
    ratio = span_ratio("turn", against="old", gradient="token")
    credit = (group_relative(scale="none"), whiten_advantages("sequences", ddof), clip_advantages(limit))
    objective = policy_gradient(ratio, clip(clip_low, clip_high), average)
    return Algorithm(
        chain(*credit, scale_by_info("turn_factor")), regularised(objective, average, kl_coefficient=kl_coefficient)
    )
