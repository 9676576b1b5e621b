"""Methods with three policies: the sampler's (behaviour), the trainer's before the update (old), and the current."""

from __future__ import annotations

import math
from typing import Literal, get_args

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Routing, Scale, Span
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import constant, sequence_sum, token_mean
from jaxrl_llm.objectives.off_policy import importance_correction, mismatch_ratio
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import span_ratio, token_ratio
from jaxrl_llm.objectives.surrogates import clip, log_probability
from jaxrl_llm.objectives.weights import capped, of_scaled_ratio, product, within
from jaxrl_llm.utils.errors import require_choice

__all__ = ["decoupled_ppo", "hispo", "minirl"]


def decoupled_ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 5.0,
    correction: Literal["mask", "truncate", "none"] = "mask",
    leave_count: bool = False,
    span: Span = "token",
    dual_clip: float | None = None,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Decoupled PPO (AReaL, arXiv 2505.24298, 2025).

    The trust region is centred on a recent policy, the old one, and a weight corrects for the behaviour policy, whose
    version may differ between tokens: with w = sg(pi_old / pi_behaviour), rho = pi / pi_old,

        loss = -1/T sum_i sum_t w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    over the T tokens of the batch. The paper's objective uses w unbounded (correction "none"). The released code masks
    tokens with w > cap ("mask"), or takes min(w, cap) ("truncate"); masked tokens stay in T unless leave_count. span
    "sequence": rho is GSPO's sequence ratio. dual_clip c > 1 bounds the loss of bad actions by c |A|. The method works
    with any A; here it is GRPO's (scale, ddof, epsilon). With pi_old = pi_behaviour it is PPO. Special rollout: an
    asynchronous sampler with bounded staleness.

    Defaults. Paper: span, dual_clip. Code: clip_low, clip_high, cap, correction, leave_count.
    Ours: scale, ddof, epsilon.
    """
    require_choice("correction", correction, ("mask", "truncate", "none"))
    mode, high = (correction, cap) if correction != "none" else ("truncate", math.exp(LARGEST))
    corrected = importance_correction("token", mode, high=high, leave_count=leave_count)
    objective = policy_gradient(span_ratio(span, "old"), clip(clip_low, clip_high, dual_clip), token_mean())
    return Algorithm(chain(group_relative(scale, ddof=ddof, epsilon=epsilon), corrected), objective)


def minirl(
    clip_low: float = 0.2,
    clip_high: float = 0.27,
    cap: float = 5.0,
    routing: Routing = "rollout",
) -> Algorithm:
    """MiniRL (Stabilizing Reinforcement Learning with LLMs, arXiv 2512.01374, 2025).

    GRPO reduced to a first-order approximation of the sequence-level objective: A_i = R_i - mean_g, the full ratio
    w = pi / pi_behaviour = (pi_old / pi_behaviour) (pi / pi_old), no division by length or standard deviation:

        loss = -1/N sum_i sum_t M_it sg(min(w_it, cap)) A_i logp_it

    M is 0 where PPO would clip r = pi / pi_old: A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. Equation 7
    prints w without the cap; the text truncates at 5.

    Of a mixture of experts updates replay the experts that tokens were sampled with (routing "rollout", R3, also for
    pi_old), or those that pi_old "recompute"s (R2, for the update only); routers go on to weigh them, and to learn. The
    paper found none best with one update a batch, R2 with two, and R3 with four or more. Other models have no routing.

    Defaults. Paper: clip_low, clip_high, cap. Ours: routing.
    """
    require_choice("routing", routing, get_args(Routing))
    weight = product(within(clip_low, clip_high), of_scaled_ratio(capped(cap), mismatch_ratio))
    objective = policy_gradient(token_ratio("old"), log_probability(weight), sequence_sum())
    return Algorithm(group_relative("none"), objective, routing=routing)


def hispo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
    sequence_bound: float = 0.2,
    token_bound: float = 0.3,
    max_length: int | None = None,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Hierarchical Importance Sampling Policy Optimization (LongCat-Flash-Prover, arXiv 2603.21065, 2026).

    Masks first whole sequences, then single tokens, on which trainer and sampler disagree. With
    d = pi_old / pi_behaviour, s_i its geometric mean over the response, and rho = pi / pi_behaviour,

        H_it = [|s_i - 1| < sequence_bound] [|d_it - 1| < token_bound]
        loss = -1/(N max_length) sum_i sum_t H_it term(rho, A),  term = min(rho, 1 + clip_high) A where A >= 0,
                                                                 clip(rho, 1 - clip_low, dual_clip) A where A < 0

    The clip acts on the full ratio, not on pi / pi_old. The paper prints none of the bounds; we interpret dual_clip as
    a ratio. max_length: the generation budget, a constant as in the paper's text; None is the longest row, as in its
    formula (there of the group, here of the batch). A as in grpo (scale, ddof, epsilon).

    Defaults. Paper: scale. Ours: clip_low, clip_high, dual_clip, sequence_bound, token_bound, ddof, epsilon.
    Run: max_length.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), constant(max_length))
    masks = (
        importance_correction("geometric", "reject", 1 - sequence_bound, 1 + sequence_bound),
        importance_correction("token", "reject", 1 - token_bound, 1 + token_bound),
    )
    return Algorithm(chain(group_relative(scale, ddof=ddof, epsilon=epsilon), *masks), objective)
