"""Divergences of a student's next-token distributions from a teacher's, whole or on some tokens, from their logs.

With s the student and t the teacher, s and t over the same tokens in the last axis, every function is differentiable
with respect to the student, and finite where a token has probability 0 (a log of -inf) under both.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number, check_number
from jaxrl_llm.utils.errors import InputError, require_choice

NEVER = -1e30  # the log of probability 0; finite, so that 0 * NEVER is 0 and not NaN
SupportOf = Literal["teacher", "student", "union"]
SUPPORTS = ("teacher", "student", "union")


def generalised_jsd(student_logp: jax.Array, teacher_logp: jax.Array, beta: Number = 0.5) -> jax.Array:
    """Generalised Jensen-Shannon divergence of log-probabilities [..., V], f[...], nats (GKD, 2306.13649).

        beta KL(t || m) + (1 - beta) KL(s || m),  m = beta t + (1 - beta) s

    and at the ends beta = 0: KL(t || s), beta = 1: KL(s || t), which are the limits of it over beta (1 - beta), and so
    far larger than its neighbours. beta: a number from 0 to 1, else InputError. Logs that do not add up to 1 are taken
    as they are.

    >>> t, s = jnp.log(jnp.asarray([0.7, 0.2, 0.1])), jnp.log(jnp.asarray([0.4, 0.5, 0.1]))
    >>> [round(float(generalised_jsd(s, t, beta)), 4) for beta in (0, 0.5, 1)]
    [0.2085, 0.0539, 0.2343]
    """
    check_number("beta of a divergence from the teacher", beta, least=0, most=1)
    s, t = jnp.maximum(student_logp, NEVER), jnp.maximum(teacher_logp, NEVER)
    if beta in (0, 1):
        first, second = (s, t) if beta else (t, s)
        return jnp.sum(jnp.exp(first) * (first - second), axis=-1)
    m = jnp.logaddexp(s + jnp.log1p(-beta), t + jnp.log(beta))
    return jnp.sum(beta * jnp.exp(t) * (t - m) + (1 - beta) * jnp.exp(s) * (s - m), axis=-1)


def with_rest(logp: jax.Array) -> jax.Array:
    """Log-probabilities of K tokens and of all others together, f[..., K + 1].

    That of the others is at least the rounding of 1, so that its log is finite.

    >>> [round(float(p), 4) for p in jnp.exp(with_rest(jnp.log(jnp.asarray([0.5, 0.3]))))]
    [0.5, 0.3, 0.2]
    """
    rest = jnp.maximum(1 - jnp.sum(jnp.exp(logp), axis=-1, keepdims=True), jnp.finfo(logp.dtype).eps)
    return jnp.concatenate([logp, jnp.log(rest)], axis=-1)


def on_support(
    student_logp: jax.Array, teacher_logp: jax.Array, beta: Number = 0.0, *, tail: bool = True,
    counts: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """`generalised_jsd` of K tokens, of log-probabilities [..., K] among all tokens; f[...].

    tail: with all other tokens as one more; otherwise both are normalised on the K. counts: bool[..., K], which of them
    count (None: all), such as not those that are there twice.
    """
    s, t = student_logp, teacher_logp
    if counts is not None:
        s, t = jnp.where(counts, s, NEVER), jnp.where(counts, t, NEVER)
    s, t = (with_rest(x) if tail else jax.nn.log_softmax(x, axis=-1) for x in (s, t))
    return generalised_jsd(s, t, beta)


def first_of_each(tokens: jax.Array) -> jax.Array:
    """bool[..., K]: whether an id of tokens int[..., K] is there for the first time.

    >>> first_of_each(jnp.asarray([4, 2, 4])).tolist()
    [True, True, False]
    """
    same = tokens[..., :, None] == tokens[..., None, :]
    return ~jnp.any(same & jnp.tril(jnp.ones(same.shape[-2:], bool), -1), axis=-1)


def top_k_divergence(
    student_logits: jax.Array, teacher_logits: jax.Array, top_k: int, beta: Number = 0.0, *,
    support: SupportOf | None = None, tail: bool = True, temperature: Number = 1.0,
) -> jax.Array:  # fmt: skip
    """The divergence on the top_k most probable tokens, of logits [..., V]; f[...], nats.

    support: whose tokens, the "teacher"'s, the "student"'s or the "union" of both; None as in TRL: the teacher's at
    beta 0, the student's at 1, the union between. Which tokens these are is not differentiated. tail: see `on_support`.
    temperature > 0 divides the logits of both. InputError for other values, and for logits of different shapes.
    """
    s, t = log_probabilities(student_logits, teacher_logits, temperature)
    check_number("top_k", top_k, least=1, whole=True)
    check_number("beta of a divergence from the teacher", beta, least=0, most=1)
    support = ("teacher" if beta == 0 else "student" if beta == 1 else "union") if support is None else support
    require_choice("support", support, SUPPORTS)
    sources = {"teacher": (t,), "student": (s,), "union": (s, t)}[support]
    count = min(top_k, s.shape[-1])
    chosen = [jax.lax.top_k(jax.lax.stop_gradient(x), count)[1] for x in sources]
    tokens = jnp.concatenate(chosen, axis=-1)
    s, t = (jnp.take_along_axis(x, tokens, axis=-1) for x in (s, t))
    return on_support(s, t, beta, tail=tail, counts=first_of_each(tokens) if len(chosen) > 1 else None)


def log_probabilities(
    student_logits: jax.Array, teacher_logits: jax.Array, temperature: Number = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities [..., V] of the student and, under stop-gradient, of the teacher, at one temperature > 0.

    InputError for logits of different shapes, and other temperatures.
    """
    check_number("temperature", temperature, above=0)
    if student_logits.shape != teacher_logits.shape:
        raise InputError(
            f"the student's logits have the shape {list(student_logits.shape)}, but the teacher's "
            f"{list(teacher_logits.shape)}: both must be over the same tokens of one vocabulary"
        )
    s, t = (jax.nn.log_softmax(x / temperature, axis=-1) for x in (student_logits, teacher_logits))
    return s, jax.lax.stop_gradient(t)
