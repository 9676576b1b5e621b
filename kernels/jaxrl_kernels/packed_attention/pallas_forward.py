"""The forward pass of `packed_attention` as a Pallas kernel for TPU (Mosaic): flash attention, 2205.14135."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.packed_attention import pallas_parts as parts
from jaxrl_kernels.packed_attention.blocks import BlockPairs, PackedTokens
from jaxrl_kernels.packed_attention.reference import MASKED, accumulation_dtype

Array = jax.Array


def _kernel(
    scalars: parts.Scalars, q: Any, k: Any, v: Any, queries: Any, keys: Any, out: Any, lse: Any,
    heads: Any, m: Any, l: Any, acc: Any, *, of: parts.Sizes, whole: bool,
) -> None:  # fmt: skip
    step = parts.step_of(scalars, of, by_key=False)

    @pl.when(step.first)
    def _() -> None:
        heads[...] = parts.beside(q[...], of)
        m[...] = jnp.full_like(m, MASKED / 2)  # above the masked logits, whose weights are then 0
        l[...] = jnp.zeros_like(l)
        acc[...] = jnp.zeros_like(acc)

    def compute(start: Any, count: int) -> None:
        here = parts.keys_at(step, of, start, count, whole)
        z, _ = parts.logits_of(k[:, here], heads[...], of)
        mask = parts.mask_of(queries[...], keys[:, here], scalars.window[0], of)
        z = jnp.where(mask, z, MASKED)
        new = jnp.maximum(m[...], jnp.max(z, axis=0, keepdims=True))
        weights, keep = jnp.exp(z - new), jnp.exp(m[...] - new)
        l[...] = keep * l[...] + jnp.sum(weights, axis=0, keepdims=True)
        value = v[:, here]
        acc[...] = keep * acc[...] + parts.product(value, weights.astype(value.dtype), parts.NN)
        m[...] = new

    parts.for_each_chunk(scalars, of, step, compute)

    @pl.when(step.last)
    def _() -> None:
        total = l[...]
        some = total > 0
        result = acc[...] * jnp.where(some, 1 / jnp.where(some, total, 1), 0)
        out[...] = parts.below(result.astype(out.dtype), of)
        lse[...] = parts.below(jnp.where(some, m[...] + jnp.log(jnp.where(some, total, 1)), MASKED), of)


def forward(
    q: Array, k: Array, v: Array, queries: PackedTokens, keys: PackedTokens, pairs: BlockPairs, window: Array,
    of: parts.Sizes,
) -> tuple[Array, Array]:  # fmt: skip
    """Results [N, L, H, h] and log-sum-exps [N, H, L]."""
    dtype = accumulation_dtype(q.dtype)
    whole = parts.resident(of, q.dtype.itemsize)
    specs = parts.specs_of(of, whole)
    arrays = [parts.tokens_last(x) for x in (q, k, v)]
    rows = jax.ShapeDtypeStruct((of.N, of.K, of.R, of.L), dtype)
    columns = of.R * of.size
    out, lse = parts.call(
        parts.partial_kernel(_kernel, of, whole=whole), "packed_attention", of,
        parts.scalars_of(pairs, False, window),
        [*arrays, parts.packed_marks(queries), parts.packed_marks(keys)],
        [specs.queries, specs.keys, specs.keys, specs.query_marks, specs.key_marks],
        [jax.ShapeDtypeStruct(arrays[0].shape, q.dtype), rows],
        [specs.queries, specs.rows],
        [pltpu.VMEM((of.h, columns), q.dtype), pltpu.VMEM((1, columns), dtype), pltpu.VMEM((1, columns), dtype),
         pltpu.VMEM((of.h, columns), dtype)],
        2, bytes_of_keys(of, whole, k) + 2 * q.nbytes + 4 * of.N * of.K * of.R * of.L,
    )  # fmt: skip
    return parts.tokens_first(out, of), lse.reshape(of.N, of.K * of.R, of.L)


def bytes_of_keys(of: parts.Sizes, whole: bool, k: Array) -> int:
    """Bytes of keys and values that a kernel reads which goes through the pairs by query."""
    if whole:
        return 2 * k.nbytes
    return 2 * k.dtype.itemsize * of.N * of.K * of.h * of.attended // of.size
