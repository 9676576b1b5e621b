from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import drop_uniform_groups, group_relative, revised
from jaxrl_llm.advantages.multipliers import standard_scores
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Number, Ours, Paper
from jaxrl_llm.core.log_ratios import log_ratio
from jaxrl_llm.core.parts import Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy

Composition = Literal["additive", "multiplicative"]


@batch_part
def regulated_by_progress(
    batch: Trajectories, gamma: float, eta: float, beta: float, buckets: int, compose: Composition, epsilon: float
) -> jax.Array:
    """A function `batch -> f32[N, L]`: the advantages of `erpo_entropy_regulated`, from those of the group."""
    mask = scored_actions(batch)
    W = jax.nn.sigmoid(gamma * standard_scores(batch.need("entropy"), mask, batch.group, epsilon=epsilon))
    s = beta * log_ratio(batch.behaviour_logp, batch.need("reference_logp"), mask)
    keys = position_keys(batch.group, batch.action_index, batch.lengths, buckets)
    s = standard_scores(s, mask, keys, epsilon=epsilon)
    return regulated(batch.need("advantages"), W, s, mask, eta, compose)


@method(paper="arXiv 2603.28204", test="test_entropy_credit.py::test_erpo_against_a_loop")
def erpo_entropy_regulated(
    gamma: Code[NonNegative] = 5.0,
    eta: Code[NonNegative] = 0.2,
    beta: Code[NonNegative] = 0.1,
    buckets: Code[Count] = 10,
    compose: Paper[Composition] = "additive",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    epsilon: Paper[NonNegative] = 1e-8,
) -> Algorithm:
    """Token-Level Entropy-Regulated Policy Optimization (ERPO).

    Adds a progress signal, the log-ratio to the reference policy, standardised among tokens at the same relative
    position and gated by entropy H. With moments over the tokens of a group (population standard deviation)

        s = beta (logp - logp_ref);  s~ = (s - mean_k) / (std_k + epsilon),  k = min(floor(buckets t / T), buckets - 1)
        W = sigmoid(gamma (H - mean) / (std + epsilon))
        A_t = A_grpo + eta W s~ sign(A_grpo)                             compose "additive"
        A_t = T A_grpo W / sum W + eta s~ sign(A_grpo)                   compose "multiplicative" (a re-implementation)

    logp is that of the sampling policy. Groups of equal rewards are dropped. The paper's average was not available to
    us: a token mean, with PPO's clip (clip_low, clip_high). beta cancels in s~ except through epsilon. The authors
    released no code; "code" below is that re-implementation.
    """
    regulate = revised(regulated_by_progress(gamma, eta, beta, buckets, compose, epsilon), {"reference_logp"})
    return Algorithm(
        transform=chain(group_relative(), regulate, drop_uniform_groups()),
        objective=clipped_policy(clip_low, clip_high),
    )


def position_keys(group: jax.Array, action_index: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """int32[N, L]: one key per group and relative position, each row divided into `count` equal parts.

    Action t of T is in part min(floor(count t / T), count - 1). Tokens that are not actions get the key of part 0.
    """
    _, index = jnp.unique(group, return_inverse=True, size=group.shape[0])
    length = jnp.maximum(lengths, 1)[:, None].astype(jnp.int32)
    return index[:, None] * count + jnp.clip(count * jnp.maximum(action_index, 0) // length, 0, count - 1)


def regulated(
    advantages: jax.Array,
    gate: jax.Array,
    signal: jax.Array,
    mask: jax.Array,
    eta: Number,
    compose: Composition = "additive",
) -> jax.Array:
    """A + eta W sign(A) s (additive), or T A W / sum W + eta sign(A) s (multiplicative) (ERPO, 2603.28204).

    gate W >= 0 and signal s f32[N, L]; T and the sum are over the masked tokens of a row.
    """
    gate = jnp.where(mask, gate, 0.0)
    if compose == "additive":
        return advantages + eta * gate * jnp.sign(advantages) * signal
    total, length = jnp.sum(gate, axis=1, keepdims=True), jnp.sum(mask, axis=1, keepdims=True)
    return advantages * length * gate / jnp.maximum(total, 1e-30) + eta * jnp.sign(advantages) * signal
