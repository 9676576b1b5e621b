"""Self-distillation at the level of distributions: rows that failed learn from a teacher with another prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Metrics, Objective, Transform, stateless
from jaxrl_llm.objectives.averaging.averages import averaged, token_mean
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import Surrogate

SMALLEST = 1e-7  # probability of the rest


def with_rest(logp: jax.Array) -> jax.Array:
    """Log-probabilities of K tokens and of all others together, f32[..., K + 1].

    >>> [round(float(p), 4) for p in jnp.exp(with_rest(jnp.log(jnp.asarray([0.5, 0.3]))))]
    [0.5, 0.3, 0.2]
    """
    rest = jnp.maximum(1 - jnp.sum(jnp.exp(logp), axis=-1, keepdims=True), SMALLEST)
    return jnp.concatenate([logp, jnp.log(rest)], axis=-1)


def jensen_shannon(p: jax.Array, q: jax.Array, share: float = 0.5) -> jax.Array:
    """(1 - a) KL(p || m) + a KL(q || m) with m = (1 - a) p + a q and a = `share`, f32[...], of logs [..., K].

    For a = 0 it is KL(q || p), and for a = 1 KL(p || q): the limits of this divergence over a (1 - a).

    >>> p, q = jnp.log(jnp.asarray([0.5, 0.5])), jnp.log(jnp.asarray([0.9, 0.1]))
    >>> print(jensen_shannon(p, q).round(4), jensen_shannon(p, q, 1.0).round(4))
    0.1017 0.5108
    """
    if share in (0, 1):
        first, second = (q, p) if share == 0 else (p, q)
        return jnp.sum(jnp.exp(first) * (first - second), axis=-1)
    mixed = jnp.logaddexp(p + jnp.log1p(-share), q + jnp.log(share))
    terms = (1 - share) * jnp.exp(p) * (p - mixed) + share * jnp.exp(q) * (q - mixed)
    return jnp.sum(terms, axis=-1)


def confidence_weights(entropy: jax.Array, mask: jax.Array, strength: float | jax.Array = 1.0) -> jax.Array:
    """exp(-strength H), divided by its mean over the mask bool[...]; f32[...], 0 outside of it (2604.02288).

    >>> H = jnp.asarray([0.167701, 1.386294, 0.940448])
    >>> [round(float(w), 4) for w in confidence_weights(H, H > 0)]
    [1.7071, 0.5047, 0.7882]
    """
    lowest = jnp.min(jnp.where(mask, entropy, jnp.inf))  # so that not all weights underflow
    weights = jnp.where(mask, jnp.exp(-strength * (entropy - jnp.where(jnp.isfinite(lowest), lowest, 0.0))), 0.0)
    return weights * jnp.sum(mask) / jnp.maximum(jnp.sum(weights), 1e-30)


@part
def route_failures(success: float = 0.5, strength: float = 1.0) -> Transform:
    """Choose the rows to distil, info["distilled"] f32[N], and weigh their tokens, info["distil_weight"] f32[N, L].

    They are those with info["teacher_tokens"] and a score of at most `success`; weights: `confidence_weights` of the
    teacher's entropy over all their actions in the batch.
    """
    check_number("success", success)
    check_number("strength", strength, least=0)

    def apply(b: Trajectories) -> Trajectories:
        tokens = (b.info or {}).get("teacher_tokens")
        rows = jnp.zeros(b.group.shape, bool) if tokens is None else jnp.any(tokens >= 0, axis=1)
        rows &= b.scores <= success
        mask = rows[:, None] & (b.loss_weights != 0)
        weight = confidence_weights(jax.lax.stop_gradient(b.need("teacher_entropy")), mask, strength)
        return b.with_info(distilled=rows.astype(jnp.float32), distil_weight=weight)

    return stateless(apply, {"teacher_tokens", "teacher_entropy"})


@part
def unless_distilled(sampled: Surrogate) -> Surrogate:
    """The surrogate `sampled`, 0 on the rows that `route_failures` chose. Statistics: its own, and "distil/share"."""

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        value, statistics = sampled(ratio, outputs, batch)
        there = jnp.broadcast_to(batch.need("distilled")[:, None] > 0, value.shape)
        return jnp.where(there, 0.0, value), {**statistics, "distil/share": there.astype(jnp.float32)}

    return surrogate


@part
def self_distillation(top: int = 100, share: float = 0.5, cap: float = 2.0) -> Objective:
    """Token mean, over all tokens, of w sg(min(rho, cap)) `jensen_shannon`(p, q) on the rows that were chosen.

    p: the policy, q: the teacher, each of the `top` most probable tokens of the policy before the update and of the
    rest. w: of `route_failures`. rho: `token_ratio`. Metric "distil/divergence": the mean divergence of those tokens,
    without w and rho, times their share.
    """
    check_number("top", top, least=1, whole=True)
    check_number("share", share, least=0, most=1)
    check_number("cap", cap, above=0)
    ratio, mean = token_ratio(), token_mean()

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        p, q = (outputs.extras or {})["top_logp"], jax.lax.stop_gradient(batch.need("teacher_logp"))
        there = (batch.need("distilled")[:, None] > 0) & (batch.loss_weights != 0)
        even = -jnp.log(1.0 + p.shape[-1])
        p, q = (with_rest(jnp.where(there[..., None], x, even)) for x in (p, q))
        divergence = jnp.where(there, jensen_shannon(p, q, share), 0.0)
        trust = jax.lax.stop_gradient(jnp.minimum(ratio(outputs, batch), cap))
        value = mean(divergence * trust * batch.need("distil_weight"), batch)
        return value, {"distil/divergence": mean(divergence, batch), "distil/loss": value}

    needs = {f"top_tokens:{top}", f"top_logp:{top}", "teacher_logp", "teacher_entropy", "teacher_tokens"}
    return averaged(objective, mean, needs)
