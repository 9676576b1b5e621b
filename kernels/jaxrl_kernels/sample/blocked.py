"""`fused_sample` by tiles of the vocabulary in plain JAX, for any platform: no [N, V] array exists at any time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.sample.noise import PERIOD
from jaxrl_kernels.sample.tile import Sums, merge, of_tile, scores

Array = jax.Array


def blocked_sums(
    hidden: Array,
    unembedding: Array,
    keys: Array,
    temperature: Array,
    allowed: Array | None,
    softcap: float,
    block_size: int,
    offset: Any = 0,
    limit: Any = None,
    aligned: bool = True,
) -> Sums:
    """Sums over the rows of `unembedding` [V, D], which are the tokens offset, offset + 1, ...; the first `limit` only.

    keys: uint32[N, 2]; temperature: f32[N]; allowed: bool or int8[N, V]; offset, limit: int32[] (None for all);
    aligned (static): offset is a multiple of `noise.PERIOD`.
    """
    vocabulary = unembedding.shape[0]
    full, short = divmod(vocabulary, block_size)

    def sums(start: Any, width: int) -> Sums:
        tile = jax.lax.dynamic_slice_in_dim(unembedding, start, width, axis=0)
        permitted = None if limit is None else (start + jnp.arange(width, dtype=jnp.int32) < limit)[None]
        if allowed is not None:
            of_mask = jax.lax.dynamic_slice_in_dim(allowed, start, width, axis=1) != 0
            permitted = of_mask if permitted is None else of_mask & permitted
        by_period = aligned and (block_size % PERIOD == 0 or full == 0)
        first = offset + start
        z, score = scores(hidden, tile, keys, temperature[:, None], permitted, first, softcap, by_period)
        return of_tile(z, jax.lax.optimization_barrier(score), first)

    # A short last tile goes first: its sums start the scan's carry, with the right varying axes in `jax.shard_map`.
    carry = sums(full * block_size, short) if short else sums(0, block_size)
    starts = jnp.arange(0 if short else 1, full, dtype=jnp.int32) * block_size
    if not starts.size:
        return carry
    return jax.lax.scan(lambda before, start: (merge(before, sums(start, block_size)), None), carry, starts)[0]
