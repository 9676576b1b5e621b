"""Group-relative methods with a regulariser: of entropies, of likelihoods, of what is mastered already."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import drop_uniform_groups, group_relative
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import require_choice
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.entropy_history import corridor_of_history, smoothed_entropy
from jaxrl_llm.objectives.penalties import likelihood_preserving, right_answers
from jaxrl_llm.rollouts.partial import Partial
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import chain, stateless

Number = float | jax.Array
__all__ = ["epo", "llds", "ulorl"]


def epo(
    entropy_coefficient: float = 0.001,
    smoothing: float = 0.1,
    corridor_low: float = 0.0,
    corridor_high: float = 2.0,
    decay: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
    total_steps: float | None = None,
) -> Algorithm:
    """Entropy-regularized Policy Optimization for agents over turns (EPO, arXiv 2509.22576, 2025).

    loss = GRPO - lambda (L_H - beta_k L_smooth): an entropy bonus averaged over tokens of a turn, turns, and
    trajectories, and a penalty, averaged alike, for token entropies outside a corridor around the run's mean so far,

        L_smooth = mean of alpha [max(0, k_l Hbar - H) + max(0, H - k_r Hbar)],  beta_k = 1 + exp(-g k / floor(K / 2))

    lambda = entropy_coefficient; alpha = smoothing (0.05 for ScienceWorld); k_l = corridor_low, k_r = corridor_high;
    g = decay (the paper's value is not known to us); K = total_steps (150 where None); k counts the updates so far and
    Hbar is their mean token entropy. While there is none L_smooth is 0. clip_low, clip_high and kl_coefficient are
    GRPO's. The released code's penalty is a constant outside the corridor, which has no gradient; this is the paper's.
    """
    base = grpo(clip_low, clip_high, kl_coefficient)
    total = 150 if total_steps is None else total_steps
    corridor = corridor_of_history(corridor_low, corridor_high, smoothing, total, decay)
    return Algorithm(chain(base.transform, corridor), base.objective - entropy_coefficient * smoothed_entropy())


def llds(
    coefficient: float = 0.2,
    gate: str = "turn",
    final: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
) -> Algorithm:
    """Lazy Likelihood-Displacement Stabilisation (On GRPO Collapse in Search-R1, arXiv 2512.04220, 2025).

    loss = GRPO + lambda mean over tokens of g max(0, log pi_behaviour - log pi), of answers with A >= 0 (also in groups
    of equal rewards): what was not bad must not become unlikely. g is 1 where the log-probability of the
    whole turn fell (gate "turn"), of the whole answer ("sequence"), or everywhere ("token"). lambda = coefficient;
    final: factor of it for the last turn, the answer (the paper's variant MA has less than 1). clip_low, clip_high and
    kl_coefficient are GRPO's. It acts only with several updates per batch, or stale rollouts.
    """
    check_number("coefficient", coefficient, least=0)
    base = grpo(clip_low, clip_high, kl_coefficient)
    return Algorithm(base.transform, base.objective + coefficient * likelihood_preserving(gate, final=final))


def mastered(
    p: jax.Array, entropy: jax.Array, right: jax.Array, mask: jax.Array, tau: Number, sigma: Number
) -> jax.Array:
    """bool[N, L]: tokens with p >= tau of right answers whose mean token entropy is below sigma."""
    H = jnp.sum(jnp.where(mask, entropy, 0.0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)
    return mask & (p >= tau) & ((sigma > H) & (right > 0))[:, None]


def ulorl(
    tau: float = 0.99,
    sigma: float = 0.2,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    sampling: str = "POIS",
    ddof: int = 0,
    epsilon: float = 1e-6,
    threshold: float = 0.5,
    segments: int = 8,
    max_length: int | None = None,
) -> Algorithm:
    """Ultra-Long Output RL (UloRL, arXiv 2507.19766, 2025).

    Tokens with p >= tau of right answers (score above `threshold`) lose their gradient while the answer's mean token
    entropy is below sigma: a thermostat without a loss term. They still count in the token mean,

        loss = -1 / sum_i |o_i| sum_{i,t} (1 - I) min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    A = (r - mean_g) / (std_g + epsilon), ddof 0 (the paper does not say); groups of equal rewards are dropped.
    p and entropies are those of the policy that sampled. sampling "POIS": rho is against the newest policy for all
    tokens, 1 at the first update; "SAIS": against the policy that drew the token's segment. The paper gives no clip.
    Its rollout decodes an answer in segments, one per iteration, and trains on it when its group is complete: the
    run's `segment_tokens`, or the longest completion, max_length (the run's), divided by `segments` (1: no segments).
    """
    check_number("segments", segments, least=1)
    check_number("tau", tau, least=0, most=1)
    require_choice("sampling", sampling, ("POIS", "SAIS"))

    def spare(batch: Trajectories) -> Trajectories:
        p, mask = jnp.exp(batch.behaviour_logp), batch.action_mask
        known = mastered(p, batch.need("entropy"), right_answers(threshold)(batch), mask, tau, sigma)
        return batch.replace(advantages=jnp.where(known, 0.0, batch.need("advantages")))

    rho = token_ratio("old" if sampling == "POIS" else "behaviour")
    transform = chain(group_relative("std", ddof, epsilon), drop_uniform_groups(), stateless(spare))
    length = 0 if max_length is None or segments == 1 else math.ceil(max_length / segments)
    strategy = Partial(segment_tokens=length) if length else None
    return Algorithm(transform, policy_gradient(rho, clip(clip_low, clip_high), token_mean()), strategy=strategy)
