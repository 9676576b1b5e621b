"""Distillation by the log-probabilities of sampled tokens alone: advantages and losses of arrays [N, L]."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number, check_number
from jaxrl_llm.objectives.distillation.divergences import on_support

TINY = 1e-8


def log_ratio_to_student(student_logp: jax.Array, teacher_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """log t - log s of the tokens, f[N, L], without a gradient; 0 outside of the mask.

    As an advantage it is the gradient of KL(s || t) on tokens that the student sampled.
    """
    return jax.lax.stop_gradient(jnp.where(mask > 0, teacher_logp - student_logp, 0.0))


def position_weights(ratio: jax.Array, mask: jax.Array, gamma: Number = 0.5) -> jax.Array:
    """1 + gamma (1 - sum_(i < t) |a_i| / sum_i |a_i|), f[N, L], of log-ratios a, 0 outside of the mask (2606.22600).

    Tokens after which student and teacher differ much weigh less. InputError for gamma below 0.

    >>> found = position_weights(jnp.asarray([[0.6, -0.1, -1.0, 0.3]]), jnp.ones((1, 4)))
    >>> [round(float(weight), 4) for weight in found[0]]
    [1.5, 1.35, 1.325, 1.075]
    """
    check_number("gamma of the weights of positions", gamma, least=0)
    size = jnp.where(mask > 0, jnp.abs(ratio), 0.0)
    total = jnp.sum(size, axis=1, keepdims=True)
    to_go = total - jnp.cumsum(size, axis=1) + size
    return jnp.where(mask > 0, 1 + gamma * to_go / jnp.maximum(total, TINY), 0.0)


def iw_opd_advantage(
    student_logp: jax.Array, teacher_logp: jax.Array, mask: jax.Array, gamma: Number = 0.5
) -> jax.Array:
    """Advantages f[N, L] of importance-weighted on-policy distillation (IW-OPD): `position_weights` times log t/s.

    student_logp: of the policy that sampled the tokens, or of the current one. gamma 0 is plain on-policy distillation.
    """
    ratio = log_ratio_to_student(student_logp, teacher_logp, mask)
    return position_weights(ratio, mask, gamma) * ratio


def minillm_advantage(
    student_logp: jax.Array, teacher_logp: jax.Array, mask: jax.Array, gamma: Number = 1.0, *,
    length_normalised: bool = True, from_start: bool = False,
) -> jax.Array:  # fmt: skip
    """Advantages f[N, L] of MiniLLM (2306.08543), with R = log t - log s and k(i, t) = i - t, tokens that follow:

        A_t = sum_(i >= t) gamma^k R_i,  divided by sum_(i >= t) gamma^k where length_normalised

    mask: which tokens there are, or their weights, f[N, L]. from_start: as TRL, gamma^i in place of gamma^(i - t),
    which makes a difference without the normalisation only. gamma 0 leaves R_t. InputError for gamma outside of [0, 1].

    >>> student, teacher = jnp.asarray([[-1.0, -0.5, -2.0]]), jnp.asarray([[-0.4, -0.6, -3.0]])
    >>> print(minillm_advantage(student, teacher, jnp.ones((1, 3)), 0.9).round(4))
    [[-0.1107 -0.5263 -1.    ]]
    """
    check_number("gamma of minillm_advantage", gamma, least=0, most=1)
    weights = jnp.asarray(mask, student_logp.dtype)
    ratio = log_ratio_to_student(student_logp, teacher_logp, mask) * weights

    def to_go(x: jax.Array) -> jax.Array:
        def add(after: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = now + gamma * after
            return found, found

        return jax.lax.scan(add, jnp.zeros_like(x[:, 0]), x.T, reverse=True)[1].T

    total = to_go(ratio)
    if length_normalised:
        length = to_go(weights)
        return total / jnp.where(length > 0, length, 1.0)
    before = jnp.arange(ratio.shape[1])
    # 0^0 is 1, so that at gamma 0 a token's own R is left: TRL leaves out the powers there, too.
    return total * jnp.power(gamma, before) if from_start and gamma else total


def sparse_top_1_divergence(
    student_logp: jax.Array, teacher_logp: jax.Array, same: jax.Array, beta: Number = 0.5, *, tail: bool = True
) -> jax.Array:
    """Divergence f[...] on two tokens: the teacher's most probable one, and the sampled one.

    student_logp, teacher_logp: f[..., 2], in this order. same: bool[...], whether both are one token. beta, tail: as in
    `on_support`; at beta 0 only the teacher's token counts, and at 1 only the sampled one, so that both need the tail.
    """
    others = jnp.zeros_like(same) if beta == 0 else ~same
    first = jnp.zeros_like(same) if beta == 1 else jnp.ones_like(same)
    counts = jnp.stack([first, jnp.ones_like(same) if beta == 1 else others], axis=-1)
    return on_support(student_logp, teacher_logp, beta, tail=tail, counts=counts)
