"""Sums over the vocabulary by blocks: expectations of next-token distributions without their logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.layers import accumulation_dtype

BLOCK = 4096


class Distribution(NamedTuple):
    """Next-token distributions of M states, softmax(cap(hidden @ unembedding.T) / temperature), unevaluated."""

    hidden: jax.Array  # [M, D]
    unembedding: jax.Array  # [V, D]
    temperature: jax.Array  # f32[M]
    softcap: float = 0.0  # static; 0 is none


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
        return z / source.temperature[:, None], first + jnp.arange(block) >= start

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
