"""Sums over the vocabulary by blocks: expectations of next-token distributions without their logits in memory.

The divergence of a student's distributions from a teacher's has gradients. With z the student's logits over the
temperature, p = softmax(z), and D = sum_v d(p_v, q_v), the derivative is

    dD / dz_v = w_v - p_v sum_u w_u,  w_v = p_v dD/dp_v

where terms of dD/dp_v that are the same for all v cancel. Each block's logits are made twice forward (for the
normalisers, then for the sums) and once more backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.half_products import over_rows

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.models.layers.parts import accumulation_dtype

BLOCK = 4096


class Distribution(NamedTuple):
    """Next-token distributions of M states, softmax(cap(hidden @ unembedding.T) / temperature), unevaluated."""

    hidden: jax.Array  # [M, D]
    unembedding: jax.Array  # [V, D]
    temperature: jax.Array  # f32[M]
    softcap: float = 0.0  # static; 0 is none
    tokens: int | None = None  # static; of the vocabulary, the others have probability 0. None: V

    def logits_of(self, rows: jax.Array) -> jax.Array:
        """The logits over the temperature, f32[M, block], of rows [block, D] of the unembedding."""
        z = jnp.einsum("md,vd->mv", self.hidden, rows, preferred_element_type=accumulation_dtype(rows.dtype))
        z = self.softcap * jnp.tanh(z / self.softcap) if self.softcap else z
        return z / self.temperature[:, None]


@jax.named_scope("head")
def vocabulary_sum(f: Callable[..., jax.Array], *distributions: Distribution, block: int = BLOCK) -> jax.Array:
    """sum_v f(log p_v, log q_v, ...) for M states of each of the distributions, f32[M].

    f: elementwise, of as many f32[M, block] as there are distributions, which share the vocabulary. Its gradient would
    keep all logits: meant for statistics under stop-gradient.

    >>> one = Distribution(jnp.zeros((1, 2)), jnp.ones((4, 2)), jnp.ones(1))
    >>> print(vocabulary_sum(lambda p: jnp.exp(2 * p), one))
    [0.25]
    """
    V = distributions[0].unembedding.shape[0]
    block = min(block, V)
    starts = jnp.arange(0, V, block)

    def logits(source: Distribution, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """f32[M, block] and which columns are new: the last block begins early enough to be whole."""
        first = jnp.minimum(start, V - block)
        rows = jax.lax.dynamic_slice_in_dim(source.unembedding, first, block)
        token = first + jnp.arange(block)
        return source.logits_of(rows), (token >= start) & (token < (source.tokens or V))

    def normaliser(source: Distribution) -> jax.Array:
        def add(sums: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
            z, new = logits(source, start)
            return jnp.logaddexp(sums, jax.nn.logsumexp(jnp.where(new, z, -jnp.inf), axis=1)), None

        return jax.lax.scan(add, jnp.full(source.hidden.shape[:1], -jnp.inf), starts)[0]

    logs = [normaliser(source) for source in distributions]

    def add(sums: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        parts = [logits(source, start) for source in distributions]
        values = f(*(z - log[:, None] for (z, _), log in zip(parts, logs, strict=True)))
        return sums + jnp.sum(jnp.where(parts[0][1], values, 0.0), axis=1), None

    return jax.lax.scan(add, jnp.zeros(distributions[0].hidden.shape[:1]), starts)[0]


def unembedding_blocks(source: Distribution, block: int = BLOCK) -> tuple[jax.Array, jax.Array]:
    """The unembedding in whole blocks [B, block, D], the last one filled up, and the first number of each."""
    V, D = source.unembedding.shape
    count = -(-V // block)
    padded = jnp.pad(source.unembedding, ((0, count * block - V), (0, 0)))
    return padded.reshape(count, block, D), jnp.arange(count) * block


def logits_of_block(source: Distribution, rows: jax.Array, start: jax.Array) -> jax.Array:
    """The logits over the temperature of a block, f32[M, block]; -inf where it was filled up."""
    known = start + jnp.arange(rows.shape[0]) < (source.tokens or source.unembedding.shape[0])
    return jnp.where(known, source.logits_of(rows), -jnp.inf)


@jax.named_scope("head")
def logp_of_tokens(source: Distribution, tokens: jax.Array, block: int = BLOCK) -> jax.Array:
    """log p of K tokens int32[M, K] for each of M states, f32[M, K], a block of the vocabulary at a time.

    Differentiable; the backward pass makes each block's logits again.

    >>> one = Distribution(jnp.zeros((1, 2)), jnp.ones((4, 2)), jnp.ones(1))
    >>> jnp.exp(logp_of_tokens(one, jnp.asarray([[3, 0]]))).tolist()
    [[0.25, 0.25]]
    """
    block = min(block, source.unembedding.shape[0])

    @jax.checkpoint
    def add(sums: tuple[jax.Array, jax.Array], each: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        z = logits_of_block(source, *each)
        at = tokens - each[1]
        inside = (at >= 0) & (at < block)
        own = jnp.take_along_axis(z, jnp.clip(at, 0, block - 1), axis=1)
        total = jnp.logaddexp(sums[0], jax.nn.logsumexp(z, axis=1))
        return (total, sums[1] + jnp.where(inside, own, 0.0)), None

    M = source.hidden.shape[0]
    first = jnp.full(M, -jnp.inf), jnp.zeros((M, tokens.shape[1]))
    total, own = jax.lax.scan(add, first, unembedding_blocks(source, block))[0]
    return own - total[:, None]


@jax.named_scope("head")
def most_probable(source: Distribution, count: int, block: int = BLOCK) -> tuple[jax.Array, jax.Array]:
    """The `count` most probable tokens int32[M, count] of M states, the best first, and their log p, f32[M, count].

    Of equally probable ones the first. A vocabulary that is smaller gives all its tokens.
    """
    V = source.unembedding.shape[0]
    block, count = min(block, V), min(count, V)

    def add(best: tuple[jax.Array, ...], each: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        z = logits_of_block(source, *each)
        values, at = jax.lax.top_k(z, min(count, block))
        values, order = jax.lax.top_k(jnp.concatenate([best[0], values], axis=1), count)
        at = (at + each[1]).astype(jnp.int32)  # of 64 bits in 64-bit mode
        tokens = jnp.take_along_axis(jnp.concatenate([best[1], at], axis=1), order, axis=1)
        return (values, tokens, jnp.logaddexp(best[2], jax.nn.logsumexp(z, axis=1))), None

    M = source.hidden.shape[0]
    first = jnp.full((M, count), -jnp.inf), jnp.zeros((M, count), jnp.int32), jnp.full(M, -jnp.inf)
    values, tokens, total = jax.lax.scan(add, first, unembedding_blocks(source, block))[0]
    return tokens, values - total[:, None]


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
    z = Distribution(*source, softcap).logits_of(rows)
    token = first + jnp.arange(form.block)
    return jnp.where((token >= start) & (token < form.tokens), z, NEVER), rows, first


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
