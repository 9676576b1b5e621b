"""Group-relative methods with a regulariser: on entropies, on likelihoods, or by masking mastered tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import drop_uniform_groups, group_relative
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.algorithms.run_settings import run_settings, several_steps
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName, Gate
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import chain, stateless
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.averaging.averages import Average
from jaxrl_llm.objectives.averaging.subset import mean_by
from jaxrl_llm.objectives.entropy_history import corridor_of_history, smoothed_entropy
from jaxrl_llm.objectives.penalties import likelihood_preserving, right_answers
from jaxrl_llm.utils.errors import require_choice

Number = float | jax.Array
__all__ = ["epo", "llds", "ulorl"]


def epo(
    entropy_coefficient: float = 0.001,
    smoothing: float = 0.1,
    corridor_low: float = 0.0,
    corridor_high: float = 2.0,
    decay: float = 3.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
    average: AverageName = "token",
    total_steps: float | None = None,
) -> Algorithm:
    """Entropy-regularized Policy Optimization for multi-turn agents (EPO, arXiv 2509.22576, 2025).

    loss = GRPO - lambda (L_H - beta_k L_smooth): an entropy bonus L_H, averaged over the tokens of a turn, then over
    turns, then over trajectories, and a penalty, averaged the same way, on token entropies outside a corridor around
    Hbar, the mean token entropy of the run so far:

        L_smooth = mean of alpha [max(0, k_l Hbar - H) + max(0, H - k_r Hbar)],  beta_k = 1 + exp(-g k / floor(K / 2))

    lambda = entropy_coefficient, alpha = smoothing (0.05 for ScienceWorld), k_l = corridor_low, k_r = corridor_high,
    g = decay, K = total_steps (150 where None), k the number of updates so far. L_smooth is 0 before the first update.
    The rest is GRPO with clip_low, clip_high, kl_coefficient (k3) and average (`grpo`'s).

    The released code penalises with a constant outside the corridor, which has no gradient, and bounds the loss of bad
    actions by 3 |A|. The hinge here is the paper's. According to the code's configuration its g is the paper's.

    Defaults. Paper: entropy_coefficient, smoothing, corridor_low, corridor_high. Code: decay, clip_low, clip_high,
    kl_coefficient, average. Run: total_steps.
    """
    base = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    total = 150 if total_steps is None else total_steps
    corridor = corridor_of_history(corridor_low, corridor_high, smoothing, total, decay)
    return Algorithm(chain(base.transform, corridor), base.objective - entropy_coefficient * smoothed_entropy())


@run_settings(several_steps("several gradient steps on a batch: at the first no likelihood has fallen"))
@presets(
    paper={"penalty_over": "nonnegative", "kl_coefficient": 0.0, "average": "prompt"},
    code={"penalty_over": "all", "kl_coefficient": 0.001, "average": "token"},
)
def llds(
    coefficient: float = 0.2,
    gate: Gate = "turn",
    final: float = 1.0,
    penalty_over: Literal["nonnegative", "all"] = "nonnegative",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    average: AverageName = "token",
) -> Algorithm:
    """Lazy Likelihood-Displacement Stabilisation (On GRPO Collapse in Search-R1, arXiv 2512.04220, 2025).

    Adds to GRPO a penalty on tokens that became less likely, so that responses with A >= 0 keep their likelihood:

        loss = GRPO + lambda 1/Z sum_{i in P} sum_t g_it max(0, d_it),   d = log pi_old - log pi

    P the responses with A_i >= 0, including those of groups with equal rewards. The gate g is 1 where the sum of d over
    the token's turn is positive (gate "turn"), over its response ("sequence"), or everywhere ("token"). penalty_over: Z
    counts the tokens of P ("nonnegative", eqs. 4 and 10 of the paper) or of the whole batch ("all", the released code).
    lambda = coefficient; final scales it on the last turn, the answer (the paper's variant MA lowers it).

    GRPO here is a token mean without KL (eq. 1), over the whole batch as in the code; average "prompt" is the mean over
    groups of each group's token mean. The code's script adds 0.001 times k3 (kl_coefficient). preset "paper" or "code"
    sets all of these. The penalty is 0 at the first update of a batch: set --epochs or --minibatches.

    Defaults. Paper: coefficient, gate, final, penalty_over, kl_coefficient. Code: clip_low, clip_high, average.
    """
    check_number("coefficient", coefficient, least=0)
    require_choice("penalty_over", penalty_over, ("nonnegative", "all"))
    base = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    mean = token_mean() if penalty_over == "all" else nonnegative_mean()
    return Algorithm(
        base.transform, base.objective + coefficient * likelihood_preserving(gate, final=final, average=mean)
    )


@part
def nonnegative_mean() -> Average:
    """Sum over all tokens / number of tokens with advantage >= 0 in the batch; 0 if there are none."""

    def count(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        return batch.with_controls(nonnegative_tokens=jnp.sum(batch.loss_weights * (batch.need("advantages") >= 0)))

    return Average(mean_by("nonnegative_tokens"), refresh=count)


def mastered(
    p: jax.Array, entropy: jax.Array, right: jax.Array, mask: jax.Array, tau: Number, sigma: Number
) -> jax.Array:
    """bool[N, L]: tokens with p >= tau in correct responses whose mean token entropy is below sigma."""
    H = jnp.sum(jnp.where(mask, entropy, 0.0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)
    return mask & (p >= tau) & ((sigma > H) & (right > 0))[:, None]


@part
def without_mastered(tau: float, sigma: float, threshold: float) -> Callable[[Trajectories], Trajectories]:
    """A function of the batch that sets the advantages of `mastered` tokens to 0."""

    def skip_mastered(batch: Trajectories) -> Trajectories:
        p, mask = jnp.exp(batch.behaviour_logp), batch.action_mask
        known = mastered(p, batch.need("entropy"), right_answers(threshold)(batch), mask, tau, sigma)
        return batch.replace(advantages=jnp.where(known, 0.0, batch.need("advantages")))

    return skip_mastered


def ulorl(
    tau: float = 0.99,
    sigma: float = 0.2,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    sampling: Literal["POIS", "SAIS"] = "POIS",
    ddof: int = 0,
    epsilon: float = 1e-6,
    threshold: float = 0.5,
    segments: int = 8,
    max_length: int | None = None,
) -> Algorithm:
    """Ultra-Long Output RL (UloRL, arXiv 2507.19766, 2025).

    Masks well-mastered tokens, p >= tau in correct responses (score above `threshold`), while the response's mean token
    entropy is below sigma; this keeps the entropy near sigma without a loss term. With I the indicator of such tokens,

        loss = -1 / sum_i |o_i| sum_{i,t} (1 - I) min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    so masked tokens still count in the mean. A = (r - mean_g) / (std_g + epsilon) with ddof (the paper does not specify
    it); groups of equal rewards are dropped. p and the entropies are those of the behaviour policy (the paper's eq. 10
    prints the entropy without its minus sign). sampling "POIS": rho is relative to the newest policy for all tokens, so
    1 at the first update; "SAIS": relative to the policy that drew the token's segment.

    The rollout decodes a response in segments, one per iteration, and trains on it when its group is complete. A
    segment is the run's `segment_tokens`, or max_length / segments tokens (segments = 1: no segments).

    Defaults. Paper: tau, sigma, sampling, segments. Ours: clip_low, clip_high, ddof, epsilon, threshold.
    Run: max_length.
    """
    check_number("segments", segments, least=1)
    check_number("tau", tau, least=0, most=1)
    require_choice("sampling", sampling, ("POIS", "SAIS"))

    rho = token_ratio("old" if sampling == "POIS" else "behaviour")
    transform = chain(
        group_relative(ddof=ddof, epsilon=epsilon),
        drop_uniform_groups(),
        stateless(without_mastered(tau, sigma, threshold)),
    )
    length = 0 if max_length is None or segments == 1 else math.ceil(max_length / segments)
    strategy = Partial(segment_tokens=length) if length else None
    return Algorithm(transform, policy_gradient(rho, clip(clip_low, clip_high), token_mean()), strategy=strategy)
