import math
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import drop_uniform_groups, group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, Fraction, NonNegative, Number, OfRun, Ours, Paper, ZeroOrOne
from jaxrl_llm.core.parts import Array, Trajectories, chain, stateless_part
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.objectives import clip, policy_gradient, right_answers, token_mean, token_ratio


def mastered(p: Array, entropy: Array, right: Array, mask: Array, tau: Number, sigma: Number) -> Array:
    """bool[N, L]: tokens with p >= tau in correct responses whose mean token entropy is below sigma."""
    H = jnp.sum(jnp.where(mask, entropy, 0.0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)
    return mask & (p >= tau) & ((sigma > H) & (right > 0))[:, None]


@stateless_part()
def without_mastered(batch: Trajectories, tau: float, sigma: float, threshold: float) -> Trajectories:
    """Set the advantages of `mastered` tokens to 0."""
    p, mask = jnp.exp(batch.behaviour_logp), batch.action_mask
    known = mastered(p, batch.need("entropy"), right_answers(threshold)(batch), mask, tau, sigma)
    return batch.replace(advantages=jnp.where(known, 0.0, batch.need("advantages")))


@method(paper="arXiv 2507.19766", test="test_regularised.py::test_ulorl_by_loop")
@beside("verifier", "the generative verifier of answers", "the run's reward")
def ulorl(
    tau: Paper[Fraction] = 0.99,
    sigma: Paper[Fraction] = 0.2,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    sampling: Paper[Literal["POIS", "SAIS"]] = "POIS",
    ddof: Ours[ZeroOrOne] = 0,
    epsilon: Ours[NonNegative] = 1e-6,
    threshold: Ours[float] = 0.5,
    segments: Paper[Count] = 8,
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Ultra-Long Output RL (UloRL).

    Masks well-mastered tokens, p >= tau in correct responses (score above `threshold`), while the response's mean token
    entropy is below sigma; this keeps the entropy near sigma without a loss term. With I the indicator of such tokens,

        loss = -1 / sum_i |o_i| sum_{i,t} (1 - I) min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    so masked tokens still count in the mean. A = (r - mean_g) / (std_g + epsilon) with ddof (the paper does not specify
    it); groups of equal rewards are dropped. p and the entropies are those of the behaviour policy (the paper's eq. 10
    prints the entropy without its minus sign). sampling "POIS": rho is relative to the newest policy for all tokens, so
    1 at the first update; "SAIS": relative to the policy that drew the token's segment.

    The rollout decodes a response in segments, one per iteration, and trains on it when its group is complete. A
    segment is the run's `segment_tokens`, or max_length / segments tokens (segments = 1: no segments).
    """
    rho = token_ratio("old" if sampling == "POIS" else "behaviour")
    credit = group_relative(ddof=ddof, epsilon=epsilon)
    transform = chain(credit, drop_uniform_groups(), without_mastered(tau, sigma, threshold))
    length = 0 if max_length is None or segments == 1 else math.ceil(max_length / segments)
    strategy = Partial(segment_tokens=length) if length else None
    return Algorithm(transform, policy_gradient(rho, clip(clip_low, clip_high), token_mean()), strategy=strategy)
