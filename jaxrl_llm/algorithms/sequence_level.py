"""Methods with an importance ratio per sequence or turn instead of per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.returns import clip_advantages, whiten_advantages
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scale
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.core.turnwise_updates import TurnPhases
from jaxrl_llm.objectives.averaging.averages import sequence_mean, sequence_sum, token_mean
from jaxrl_llm.objectives.off_policy import scale_by_info, sequence_factor
from jaxrl_llm.objectives.policy_gradient import policy_gradient, regularised
from jaxrl_llm.objectives.ratios import sequence_ratio, span_ratio, token_ratio
from jaxrl_llm.objectives.surrogates import clip, geometric_clip, log_probability
from jaxrl_llm.objectives.weights import by_sign, gamma, of_scaled_ratio
from jaxrl_llm.utils.errors import require_choice

__all__ = ["gmpo", "gspo", "gspo_token", "luspo", "seeupo", "vespo"]


def gspo(
    clip_low: float = 3e-4, clip_high: float = 4e-4, scale: Scale = "std", ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """Group Sequence Policy Optimization (GSPO, arXiv 2507.18071, 2025).

    Ratio and clip are at the sequence level, like the reward: a response is kept or clipped as a whole. With GRPO's A_i
    (scale, ddof, epsilon) and s_i = exp(1/|o_i| sum_t (logp - logp_behaviour)),

        loss = -1/N sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    s is a geometric mean, hence close to 1, so clip_low and clip_high are about a thousandth of GRPO's. No KL. verl
    clamps the log-ratio from above at 10.

    Defaults. Paper: clip_low, clip_high, scale. Code: ddof, epsilon.
    """
    objective = policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)


def gspo_token(
    clip_low: float = 3e-4, clip_high: float = 4e-4, scale: Scale = "std", ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """GSPO with Token-Level Advantages (GSPO, section GSPO-token, arXiv 2507.18071, 2025).

    As gspo, but each token has the value s_i and the gradient of its own log-probability,
    s_it = sg(s_i) exp(logp_it - sg(logp_it)), and is clipped by its own advantage:

        loss = -1/N sum_i 1/|o_i| sum_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)

    With GRPO's advantages (scale, ddof, epsilon), equal on all tokens of a response, it is exactly gspo; use it with
    transforms whose advantages differ between tokens.

    Defaults. Paper: clip_low, clip_high, scale. Code: ddof, epsilon.
    """
    objective = policy_gradient(sequence_ratio(gradient="token"), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)


def gmpo(
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    kl_coefficient: float = 0.0,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Geometric-Mean Policy Optimization (GMPO, arXiv 2507.20673, 2025).

    The geometric mean of token ratios, each clipped in log space before the mean (GSPO clips after it):

        d'_t = min(d_t, clip_high) where A > 0, max(d_t, -clip_low) where A < 0,   d = logp - logp_behaviour
        loss = -1/N sum_i A_i exp(1/|o_i| sum_t d'_t)

    clip_low and clip_high bound log-ratios, not ratios 1 +- e. A as in `grpo` (scale, ddof, epsilon); kl_coefficient
    scales the sequence mean of k3 (TRL). verl divides by |o_i| + 1e-8 and counts rows without actions in N.

    Defaults. Paper: clip_low, clip_high, kl_coefficient, scale. Code: ddof, epsilon.
    """
    average = sequence_mean()
    objective = policy_gradient(token_ratio(), geometric_clip(clip_low, clip_high), average)
    return Algorithm(
        group_relative(scale, ddof=ddof, epsilon=epsilon),
        regularised(objective, average, kl_coefficient=kl_coefficient),
    )


def luspo(
    clip_low: float = 2e-3, clip_high: float = 2.5e-3, scale: Scale = "std", ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """Length-Unbiased Sequence Policy Optimization (LUSPO, arXiv 2602.05261, 2026).

    GSPO with each sequence's term multiplied by its length: tokens of long and short responses have equal weight.
    With GRPO's A_i (scale, ddof, epsilon) and GSPO's s_i,

        loss = -1/N sum_i |o_i| min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The loss is about the mean length times GSPO's, so the learning rate must be lower. TRL counts rows without actions
    in N; they are not counted here.

    Defaults. Paper: clip_low, clip_high, scale. Code: ddof, epsilon.
    """
    objective = policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_sum())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)


def vespo(
    positive_power: float = 2.0,
    positive_decay: float = 3.0,
    negative_power: float = 3.0,
    negative_decay: float = 2.0,
    correction: Literal["none", "truncate", "mask"] = "none",
    cap: float = 2.0,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Variational Sequence-Level Soft Policy Optimization (VESPO, arXiv 2602.10693, 2026).

    Replaces the clip by a smooth weight of the sequence's full ratio W_i = prod_t rho_it, not length-normalised:

        phi(W) = W^k exp(lambda (1 - W)),   loss = -1/T sum_i sum_t sg(phi(W_i)) A_i logp_it

    T the tokens of the batch; (k, lambda) = (positive_power, positive_decay) where A >= 0, else (negative_power,
    negative_decay). phi(1) = 1, and phi is maximal at k / lambda. A as in `grpo` (scale, ddof, epsilon).

    correction "none": W is the ratio of current to behaviour policy. "truncate" and "mask": W is the ratio of current
    to old policy times the product of the tokens' weights w of old to behaviour policy, as min(w, cap), or as w where
    w <= cap and 1e-8 elsewhere. W is at least 1e-8.

    Defaults. Code: positive_power, positive_decay, negative_power, negative_decay, correction, cap, scale, ddof,
    epsilon.
    """
    require_choice("correction", correction, ("none", "truncate", "mask"))
    weight = by_sign(gamma(positive_power, positive_decay), gamma(negative_power, negative_decay))
    ratio = sequence_ratio("behaviour" if correction == "none" else "old", mean=False)
    if correction != "none":
        weight = of_scaled_ratio(weight, mismatch_of_sequence(correction, cap))
    objective = policy_gradient(ratio, log_probability(weight), token_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)


@part
def mismatch_of_sequence(correction: Literal["truncate", "mask"], cap: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: `sequence_factor` of the batch."""
    return lambda batch: sequence_factor(batch, correction, cap)


def seeupo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.002,
    limit: float = 3.0,
    ddof: int = 1,
    factor_clip: float = 0.2,
) -> Algorithm:
    """Sequence-Level Sequential Update Policy Optimisation (SeeUPO, arXiv 2602.06554, 2026).

    The turns of an episode are treated as agents that share weights and are updated one after the other, the last turn
    first. A_i = R_i - mean_g R (no group deviation), standardised over the batch (ddof) and clipped to +-limit. In the
    phase of turn t, whose tokens alone count, old log-probabilities are computed anew, and

        loss = -1/N sum_i 1/|o_i| sum_t min(s M_i A_i, clip(s, 1 - clip_low, 1 + clip_high) M_i A_i)
               + kl_coefficient mean k3

    with s the turn's geometric mean ratio, differentiated per token as in `gspo_token`, N the episodes that have the
    turn, and the mean of k3 over these of the mean over tokens. M_i is the ratio, clipped to 1 +- factor_clip, by which
    the phases of later turns changed theirs (`turnwise_updates.TurnPhases`). A batch takes as many updates as its
    longest episode has turns. For a single turn the method is GSPO with batch-normalised advantages. The paper's other
    orders of turns, forward and random, are ablations and not here.

    Without the turn factor (--algorithm.without turn_factor) all turns are updated at once.

    Defaults. Code: clip_low, clip_high, kl_coefficient, limit, ddof, factor_clip.
    """
    average = sequence_mean()
    ratio = span_ratio("turn", against="old", gradient="token")
    credit = (group_relative("none"), whiten_advantages("sequences", ddof), clip_advantages(limit))
    objective = policy_gradient(ratio, clip(clip_low, clip_high), average)
    return Algorithm(
        chain(*credit, scale_by_info("turn_factor")), regularised(objective, average, kl_coefficient=kl_coefficient),
        phases=TurnPhases(factor_clip),
    )  # fmt: skip
