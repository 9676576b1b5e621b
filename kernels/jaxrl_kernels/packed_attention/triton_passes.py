"""`packed_attention` as Pallas kernels for NVIDIA GPUs (Triton): flash attention, 2307.08691.

The two of the backward pass compute the logits again. With weights p = exp(z - lse), derivatives dp = do . v and
D = do . out - dlse, the derivative of a logit is p (dp - D). One kernel sums dq of a block of queries; the other dk and
dv of a block of keys, over all heads that share them, so that results do not depend on the order in which programs run.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxrl_kernels.packed_attention import triton_parts as parts
from jaxrl_kernels.packed_attention.blocks import BlockPairs, PackedTokens
from jaxrl_kernels.packed_attention.reference import MASKED, Sizes

Array = jax.Array


def _forward_kernel(
    q: Any, k: Any, v: Any, number: Any, place: Any, enter: Any, leave: Any, position: Any, listed: Any, counts: Any,
    window: Any, out: Any, lse: Any, *, of: Sizes, tile: parts.Tile,
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
    acc, m, l = parts.visit(listed, counts, parts.block_of(tile.queries), tile.keys, compute, initial)
    some = l > 0
    total = jnp.where(some, l, 1)
    parts.write(out, acc * jnp.where(some, 1 / total, 0)[:, None], of)
    lse[...] = jnp.where(some, (m + jnp.log2(total)) * math.log(2), MASKED).astype(lse.dtype)


def forward(
    q: Array, k: Array, v: Array, queries: PackedTokens, keys: PackedTokens, pairs: BlockPairs, window: Array, of: Sizes
) -> tuple[Array, Array]:
    """Results [N, L, H, h] and log-sum-exps [N, H, L]."""
    tile, visits = parts.tile_of(of, "forward"), pairs.visits
    specs, H = parts.specs_of(of, tile, by_key=False), of.K * of.R
    return parts.call(
        partial(_forward_kernel, of=of, tile=tile), "packed_attention", of, tile, (of.L // tile.queries, H, of.N),
        [q, k, v, queries.enter, queries.position, *keys, visits.keys, visits.key_counts, window.reshape(1)],
        [specs.queries, specs.keys, specs.keys, *[specs.of_queries] * 2, *[specs.of_keys] * 3,
         specs.scalars(visits.keys), specs.scalars(visits.key_counts), parts.WINDOW],
        [q, jax.ShapeDtypeStruct((of.N, H, of.L), of.accumulation)], [specs.queries, specs.rows], 2,
    )  # fmt: skip


def _dq_kernel(
    q: Any, k: Any, v: Any, d_out: Any, lse: Any, sums: Any, number: Any, place: Any, enter: Any, leave: Any,
    position: Any, listed: Any, counts: Any, window: Any, dq: Any, *, of: Sizes, tile: parts.Tile,
) -> None:  # fmt: skip
    whole = (slice(None), slice(None))
    query, d_result = parts.read(q, whole, of), parts.read(d_out, whole, of)
    queries, limit = (number[...][:, None], place[...][:, None]), window[0]
    of_rows = lse[...][:, None] * parts.LOG2E, sums[...][:, None]

    def compute(here: Any, acc: Array) -> Array:
        key, value = (parts.read(x, (here, slice(None)), of) for x in (k, v))
        z, slope = parts.logits(query, key, of)
        keys = (enter[here][None, :], leave[here][None, :], position[here][None, :])
        p = jnp.where(parts.sees(queries, keys, limit), jnp.exp2(z - of_rows[0]), 0)
        ds = p * (parts.product(d_result, value, of, transposed=True) - of_rows[1])
        ds = ds if slope is None else ds * slope
        return acc + parts.product(ds.astype(key.dtype), key, of)

    block = parts.block_of(tile.queries)
    acc = jnp.zeros((tile.queries, of.units), of.accumulation)
    acc = parts.visit(listed, counts, block, tile.keys, compute, acc)
    parts.write(dq, acc * of.numbers.query_scale, of)


def _dkv_kernel(
    q: Any, k: Any, v: Any, d_out: Any, lse: Any, sums: Any, number: Any, place: Any, enter: Any, leave: Any,
    position: Any, listed: Any, counts: Any, window: Any, dk: Any, dv: Any, *, of: Sizes, tile: parts.Tile,
) -> None:  # fmt: skip
    whole = (slice(None), slice(None))
    key, value = parts.read(k, whole, of), parts.read(v, whole, of)
    keys, limit = (enter[...][:, None], leave[...][:, None], position[...][:, None]), window[0]

    def compute(head: Any, here: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk_acc, dv_acc = carry
        query, d_result = (parts.read(x, (here, head, slice(None)), of) for x in (q, d_out))
        z, slope = parts.logits(key, query, of)
        mask = parts.sees((number[here][None, :], place[here][None, :]), keys, limit)
        p = jnp.where(mask, jnp.exp2(z - lse[head, here][None, :] * parts.LOG2E), 0)
        dv_acc = dv_acc + parts.product(p.astype(query.dtype), d_result, of)
        ds = p * (parts.product(value, d_result, of, transposed=True) - sums[head, here][None, :])
        ds = ds if slope is None else ds * slope
        return dk_acc + parts.product(ds.astype(query.dtype), query, of), dv_acc

    block = parts.block_of(tile.keys)

    def of_head(head: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return parts.visit(listed, counts, block, tile.queries, partial(compute, head), carry)

    zeros = jnp.zeros((tile.keys, of.units), of.accumulation)
    dk_acc, dv_acc = jax.lax.fori_loop(np.int32(0), np.int32(of.R), of_head, (zeros, zeros))
    parts.write(dk, dk_acc * of.numbers.query_scale, of)
    parts.write(dv, dv_acc, of)


def backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, d_out: Array, d_lse: Array,
    queries: PackedTokens, keys: PackedTokens, pairs: BlockPairs, window: Array, of: Sizes,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The derivatives of q, k and v. out, lse: of `forward`."""
    visits = pairs.visits
    products = out.astype(of.accumulation) * d_out.astype(of.accumulation)
    sums = jnp.sum(products, axis=-1).swapaxes(1, 2) - d_lse.astype(of.accumulation)
    d_out = d_out.astype(q.dtype)
    window = window.reshape(1)
    inputs = [q, k, v, d_out, lse.astype(of.accumulation), sums, queries.enter, queries.position, *keys]

    def in_specs(specs: parts.Specs, listed: Array, counts: Array) -> list[pl.BlockSpec]:
        return [
            specs.queries, specs.keys, specs.keys, specs.queries, specs.rows, specs.rows, *[specs.of_queries] * 2,
            *[specs.of_keys] * 3, specs.scalars(listed), specs.scalars(counts), parts.WINDOW,
        ]  # fmt: skip

    tile, lists = parts.tile_of(of, "dq"), (visits.keys, visits.key_counts)
    specs = parts.specs_of(of, tile, by_key=False)
    (dq,) = parts.call(
        partial(_dq_kernel, of=of, tile=tile), "packed_attention_dq", of, tile,
        (of.L // tile.queries, of.K * of.R, of.N), [*inputs, *lists, window], in_specs(specs, *lists),
        [q], [specs.queries], 3,
    )  # fmt: skip
    tile, lists = parts.tile_of(of, "dkv"), (visits.queries, visits.query_counts)
    specs = parts.specs_of(of, tile, by_key=True)
    dk, dv = parts.call(
        partial(_dkv_kernel, of=of, tile=tile), "packed_attention_dkv", of, tile,
        (of.S // tile.keys, of.K, of.N), [*inputs, *lists, window], in_specs(specs, *lists),
        [k, v], [specs.keys, specs.keys], 4,
    )  # fmt: skip
    return dq, dk, dv
