"""Divergence of a student's next-token distributions from a teacher's, whole, by blocks of the vocabulary.

With z the student's logits over the temperature, p = softmax(z), and D = sum_v d(p_v, q_v), the derivative is

    dD / dz_v = w_v - p_v sum_u w_u,  w_v = p_v dD/dp_v

where terms of dD/dp_v that are the same for all v cancel. Each block's logits are made twice forward (for the
normalisers, then for the sums) and once more backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.half_products import over_rows

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.vocabulary import BLOCK, Distribution

NEVER = -1e30  # the log of probability 0


class _Arrays(NamedTuple):
    """The arrays of a `Distribution`."""

    hidden: jax.Array
    unembedding: jax.Array
    temperature: jax.Array


class _Form(NamedTuple):
    """What is static."""

    beta: float
    softcaps: tuple[float, float]
    tokens: int  # those below this are compared
    block: int


@jax.named_scope("head")
def divergence(student: Distribution, teacher: Distribution, beta: float = 0.5, block: int = BLOCK) -> jax.Array:
    """`generalised_jsd` of M distributions of each, f32[M], nats, without their logits in memory.

    Differentiable once, in reverse mode, with respect to the student's hidden states and unembedding. Both are over the
    tokens that both have, so that one may have more rows of padding. beta from 0, KL(teacher || student), to 1,
    KL(student || teacher). Memory is a few f32[M, block], and the gradients.

    >>> one = Distribution(jnp.ones((1, 1)), jnp.log(jnp.asarray([[0.4], [0.5], [0.1]])), jnp.ones(1))
    >>> other = one._replace(unembedding=jnp.log(jnp.asarray([[0.7], [0.2], [0.1]])))
    >>> print(f"{float(divergence(one, other, 1.0)[0]):.4f}")
    0.2343
    """
    check_number("beta of a divergence from the teacher", beta, least=0, most=1)
    rows = min(source.unembedding.shape[0] for source in (student, teacher))
    tokens = min(source.tokens or rows for source in (student, teacher))
    form = _Form(float(beta), (student.softcap, teacher.softcap), min(tokens, rows), min(block, rows))
    arrays = [_Arrays(*source[:3]) for source in (student, teacher)]
    return _divergence(arrays[0], jax.lax.stop_gradient(arrays[1]), form)


def _terms(s: jax.Array, t: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """d and w of logs of probabilities, elementwise."""
    p, q = jnp.exp(s), jnp.exp(t)
    if beta == 0:
        return q * (t - s), -q
    if beta == 1:
        return p * (s - t), p * (s - t)
    m = jnp.logaddexp(s + jnp.log1p(-beta), t + jnp.log(beta))
    w = (1 - beta) * p * (s - m)
    return beta * q * (t - m) + w, w


def _logits(source: _Arrays, softcap: float, form: _Form, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a block: logits over the temperature f32[M, block], `NEVER` where they do not count; its rows [block, D] of
    the unembedding, and the first of them. The last block begins early enough to be whole."""
    first = jnp.minimum(start, min(source.unembedding.shape[0], _rows(form)) - form.block)
    rows = jax.lax.dynamic_slice_in_dim(source.unembedding, first, form.block)
    z = jnp.einsum("md,vd->mv", source.hidden, rows, preferred_element_type=accumulation_dtype(rows.dtype))
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    token = first + jnp.arange(form.block)
    counts = (token >= start) & (token < form.tokens)
    return jnp.where(counts, z / source.temperature[:, None], NEVER), rows, first


def _rows(form: _Form) -> int:
    """Rows of the unembeddings that are looked at: at least a block."""
    return max(form.tokens, form.block)


def _starts(form: _Form) -> jax.Array:
    return jnp.arange(0, _rows(form), form.block)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _divergence(student: _Arrays, teacher: _Arrays, form: _Form) -> jax.Array:
    return _forward(student, teacher, form)[0]


def _forward(student: _Arrays, teacher: _Arrays, form: _Form) -> tuple[jax.Array, Any]:
    sources = (student, teacher)
    dtype = accumulation_dtype(student.hidden.dtype)
    none = jnp.zeros(student.hidden.shape[:1], dtype)

    def normalise(sums: tuple[jax.Array, ...], start: jax.Array) -> tuple[Any, None]:
        blocks = (_logits(x, cap, form, start)[0] for x, cap in zip(sources, form.softcaps, strict=True))
        here = (jax.nn.logsumexp(z, axis=1) for z in blocks)
        return tuple(jnp.logaddexp(x, y).astype(dtype) for x, y in zip(sums, here, strict=True)), None

    logs = jax.lax.scan(normalise, (none + NEVER, none + NEVER), _starts(form))[0]

    def add(sums: tuple[jax.Array, ...], start: jax.Array) -> tuple[Any, None]:
        (s, *_), (t, *_) = _normalised(sources, logs, form, start)
        found = _terms(s, t, form.beta)
        return tuple(x + jnp.sum(y, axis=1).astype(dtype) for x, y in zip(sums, found, strict=True)), None

    value, weight = jax.lax.scan(add, (none, none), _starts(form))[0]
    return value, (student, teacher, logs, weight)


def _normalised(sources: tuple[_Arrays, ...], logs: tuple[jax.Array, ...], form: _Form, start: jax.Array) -> list[Any]:
    """Of each source, logs of a block's probabilities, `NEVER` for those that do not count, rows and the first."""
    found = [_logits(x, cap, form, start) for x, cap in zip(sources, form.softcaps, strict=True)]
    return [(jnp.maximum(z - log[:, None], NEVER), *rest) for (z, *rest), log in zip(found, logs, strict=True)]


def _backward(form: _Form, saved: Any, cotangent: jax.Array) -> tuple[Any, Any]:
    student, teacher, logs, weight = saved
    hidden, head = student.hidden, student.unembedding
    dtype = accumulation_dtype(head.dtype)

    def add(sums: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple[Any, None]:
        (s, rows, first), (t, _, _) = _normalised((student, teacher), logs, form, start)
        dz = _terms(s, t, form.beta)[1] - jnp.exp(s) * weight[:, None]
        dz = dz * (cotangent / student.temperature)[:, None]
        if cap := form.softcaps[0]:
            capped = (s + logs[0][:, None]) * student.temperature[:, None]
            dz = dz * jnp.where(s > NEVER, 1 - jnp.square(capped / cap), 0.0)
        dz = dz.astype(head.dtype)
        d_hidden = jnp.einsum("mv,vd->md", dz, rows, preferred_element_type=dtype)
        d_rows = over_rows(dz, hidden.astype(dz.dtype)).astype(head.dtype)
        before = jax.lax.dynamic_slice_in_dim(sums[1], first, form.block)
        return (sums[0] + d_hidden, jax.lax.dynamic_update_slice_in_dim(sums[1], before + d_rows, first, axis=0)), None

    start = jnp.zeros(hidden.shape, dtype), jnp.zeros(head.shape, head.dtype)
    d_hidden, d_head = jax.lax.scan(add, start, _starts(form))[0]
    zero: Any = None
    return _Arrays(d_hidden.astype(hidden.dtype), d_head, zero), zero


_divergence.defvjp(_forward, _backward)
