"""The forward pass of `packed_attention` as a Pallas kernel for NVIDIA GPUs (Triton): flash attention, 2307.08691."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.packed_attention import triton_parts as parts
from jaxrl_kernels.packed_attention.blocks import PackedTokens, Visits
from jaxrl_kernels.packed_attention.reference import MASKED

Array = jax.Array


def _kernel(
    q: Any, k: Any, v: Any, number: Any, place: Any, enter: Any, leave: Any, position: Any, listed: Any, counts: Any,
    window: Any, out: Any, lse: Any, *, of: parts.Sizes, tile: parts.Tile,
) -> None:  # fmt: skip
    query = parts.read(q, (slice(None), slice(None)), of)
    queries, limit = (number[...][:, None], place[...][:, None]), window[0]

    def compute(here: Any, carry: Any) -> Any:
        acc, m, l = carry
        z, _ = parts.logits(query, parts.read(k, (here, slice(None)), of), of)
        keys = (enter[here][None, :], leave[here][None, :], position[here][None, :])
        z = jnp.where(parts.sees(queries, keys, limit), z, MASKED)
        new = jnp.maximum(m, jnp.max(z, axis=1))
        weights, keep = jnp.exp2(z - new[:, None]), jnp.exp2(m - new)
        value = parts.read(v, (here, slice(None)), of)
        acc = acc * keep[:, None] + parts.product(weights.astype(value.dtype), value, of)
        return acc, new, l * keep + jnp.sum(weights, axis=1)

    rows = (tile.queries,)
    initial = (
        jnp.zeros((*rows, of.units), of.accumulation),
        jnp.full(rows, MASKED / 2, of.accumulation),  # above the masked logits, whose weights are then 0
        jnp.zeros(rows, of.accumulation),
    )
    block = parts.block_of(tile.queries)
    acc, m, l = parts.visit(listed, counts, block, tile.keys, compute, initial)
    some = l > 0
    total = jnp.where(some, l, 1)
    parts.write(out, acc * jnp.where(some, 1 / total, 0)[:, None], of)
    lse[...] = jnp.where(some, (m + jnp.log2(total)) * math.log(2), MASKED).astype(lse.dtype)


def forward(
    q: Array, k: Array, v: Array, queries: PackedTokens, keys: PackedTokens, visits: Visits, window: Array,
    of: parts.Sizes,
) -> tuple[Array, Array]:  # fmt: skip
    """Results [N, L, H, h] and log-sum-exps [N, H, L]."""
    tile = parts.tile_of(of, "forward")
    specs, H = parts.specs_of(of, tile, by_key=False), of.K * of.R
    return parts.call(
        partial(_kernel, of=of, tile=tile), "packed_attention", of, tile, (of.L // tile.queries, H, of.N),
        [q, k, v, *parts.of_queries(queries), *keys, visits.keys, visits.key_counts, window.reshape(1)],
        [specs.queries, specs.keys, specs.keys, *[specs.of_queries] * 2, *[specs.of_keys] * 3,
         specs.scalars(visits.keys), specs.scalars(visits.key_counts), parts.WINDOW],
        [q, jax.ShapeDtypeStruct((of.N, H, of.L), of.accumulation)], [specs.queries, specs.rows], 2,
    )  # fmt: skip
