"""Sums over the vocabulary by blocks: expectations of next-token distributions without their logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.layers.parts import accumulation_dtype

BLOCK = 4096


class Distribution(NamedTuple):
    """Next-token distributions of M states, softmax(cap(hidden @ unembedding.T) / temperature), unevaluated."""

    hidden: jax.Array  # [M, D]
    unembedding: jax.Array  # [V, D]
    temperature: jax.Array  # f32[M]
    softcap: float = 0.0  # static; 0 is none
    tokens: int | None = None  # static; of the vocabulary, the others have probability 0. None: V


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
        z = jnp.einsum("md,vd->mv", source.hidden, rows, preferred_element_type=accumulation_dtype(rows.dtype))
        if source.softcap:
            z = source.softcap * jnp.tanh(z / source.softcap)
        token = first + jnp.arange(block)
        return z / source.temperature[:, None], (token >= start) & (token < (source.tokens or V))

    def normaliser(source: Distribution) -> jax.Array:
        def add(sums: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
            z, new = logits(source, start)
            here = jax.nn.logsumexp(jnp.where(new, z, -jnp.inf), axis=1)
            return jnp.logaddexp(sums, here), None

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
    z = jnp.einsum("md,vd->mv", source.hidden, rows, preferred_element_type=accumulation_dtype(rows.dtype))
    if source.softcap:
        z = source.softcap * jnp.tanh(z / source.softcap)
    known = start + jnp.arange(rows.shape[0]) < (source.tokens or source.unembedding.shape[0])
    return jnp.where(known, z / source.temperature[:, None], -jnp.inf)


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
