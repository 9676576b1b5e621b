"""`packed_attention` as Pallas kernels for TPU (Mosaic): flash attention, 2205.14135.

The two of the backward pass compute the logits again. With weights p = exp(z - lse), derivatives dp = do . v and
D = do . out - dlse, the derivative of a logit is p (dp - D). One kernel goes through the pairs of blocks by query,
computes D and sums dq; the other, by key, sums dk and dv.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.packed_attention import pallas_parts as parts
from jaxrl_kernels.packed_attention.blocks import BlockPairs, PackedTokens
from jaxrl_kernels.packed_attention.reference import MASKED, Sizes, accumulation_dtype

Array = jax.Array


def _forward_kernel(
    scalars: parts.Scalars, q: Any, k: Any, v: Any, queries: Any, keys: Any, out: Any, lse: Any,
    heads: Any, m: Any, l: Any, acc: Any, *, of: Sizes, whole: bool,
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
        z = jnp.where(parts.mask_of(queries[...], keys[:, here], scalars.window[0], of), z, MASKED)
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
        out[...] = parts.below((acc[...] * jnp.where(some, 1 / jnp.where(some, total, 1), 0)).astype(out.dtype), of)
        lse[...] = parts.below(jnp.where(some, m[...] + jnp.log(jnp.where(some, total, 1)), MASKED), of)


def forward(
    q: Array, k: Array, v: Array, queries: PackedTokens, keys: PackedTokens, pairs: BlockPairs, window: Array, of: Sizes
) -> tuple[Array, Array]:
    """Results [N, L, H, h] and log-sum-exps [N, H, L]."""
    dtype, whole = accumulation_dtype(q.dtype), parts.resident(of, q.dtype.itemsize)
    specs = parts.specs_of(of, whole)
    arrays = [parts.tokens_last(x) for x in (q, k, v)]
    rows = jax.ShapeDtypeStruct((of.N, of.K, of.R, of.L), dtype)
    columns = of.R * of.size
    out, lse = parts.call(
        parts.partial_kernel(_forward_kernel, of, whole=whole), "packed_attention", of,
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


def bytes_of_keys(of: Sizes, whole: bool, k: Array) -> int:
    """Bytes of keys and values that a kernel reads which goes through the pairs by query."""
    return 2 * k.nbytes if whole else 2 * k.dtype.itemsize * of.N * of.K * of.h * of.attended // of.size


def _weights_and_derivatives(
    k: Array, v: Array, q: Array, d_out: Array, lse: Array, sums: Array, mask: Array, of: Sizes
) -> tuple[Array, Array]:
    """Weights and derivatives of the products q . k, [keys, R x size] each."""
    z, slope = parts.logits_of(k, q, of)
    p = parts.weights_of(z, mask, lse)
    ds = p * (parts.product(v, d_out, parts.TN) - sums) * of.numbers.query_scale
    return p, ds if slope is None else ds * slope


def _dq_kernel(
    scalars: parts.Scalars, q: Any, k: Any, v: Any, d_out: Any, result: Any, lse: Any, d_lse: Any, queries: Any,
    keys: Any, dq: Any, sums: Any, heads: Any, d_heads: Any, of_rows: Any, acc: Any, *, of: Sizes, whole: bool,
) -> None:  # fmt: skip
    step = parts.step_of(scalars, of, by_key=False)

    @pl.when(step.first)
    def _() -> None:
        heads[...] = parts.beside(q[...], of)
        d_heads[...] = parts.beside(d_out[...], of)
        acc[...] = jnp.zeros_like(acc)
        both = d_heads[...].astype(acc.dtype) * parts.beside(result[...], of).astype(acc.dtype)
        of_rows[...] = jnp.sum(both, axis=0, keepdims=True) - parts.along_lanes(d_lse[...], of)
        sums[...] = parts.below(of_rows[...], of)

    def compute(start: Any, count: int) -> None:
        here = parts.keys_at(step, of, start, count, whole)
        mask = parts.mask_of(queries[...], keys[:, here], scalars.window[0], of)
        rows = parts.along_lanes(lse[...], of), of_rows[...]
        key = k[:, here]
        _, ds = _weights_and_derivatives(key, v[:, here], heads[...], d_heads[...], *rows, mask, of)
        acc[...] += parts.product(key, ds.astype(key.dtype), parts.NN)

    parts.for_each_chunk(scalars, of, step, compute)

    @pl.when(step.last)
    def _() -> None:
        dq[...] = parts.below(acc[...].astype(dq.dtype), of)


def _dkv_kernel(
    scalars: parts.Scalars, q: Any, k: Any, v: Any, d_out: Any, lse: Any, sums: Any, queries: Any, keys: Any,
    dk: Any, dv: Any, dk_acc: Any, dv_acc: Any, *, of: Sizes,
) -> None:  # fmt: skip
    step = parts.step_of(scalars, of, by_key=True)

    @pl.when(step.first)
    def _() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def compute(start: Any, count: int) -> None:
        here = pl.ds(start, count)
        mask = parts.mask_of(queries[...], keys[:, here], scalars.window[0], of)
        rows = parts.along_lanes(lse[...], of), parts.along_lanes(sums[...], of)
        query, d_result = parts.beside(q[...], of), parts.beside(d_out[...], of)
        p, ds = _weights_and_derivatives(k[:, here], v[:, here], query, d_result, *rows, mask, of)
        dv_acc[:, here] += parts.product(d_result, p.astype(query.dtype), parts.NT)
        dk_acc[:, here] += parts.product(query, ds.astype(query.dtype), parts.NT)

    parts.for_each_chunk(scalars, of, step, compute)

    @pl.when(step.last)
    def _() -> None:
        dk[...] = dk_acc[...].astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)


def backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, d_out: Array, d_lse: Array,
    queries: PackedTokens, keys: PackedTokens, pairs: BlockPairs, window: Array, of: Sizes,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """The derivatives of q, k and v. out, lse: of `forward`."""
    dtype, columns, whole = accumulation_dtype(q.dtype), of.R * of.size, parts.resident(of, q.dtype.itemsize)
    of_lse, of_d_lse = (x.reshape(of.N, of.K, of.R, of.L).astype(dtype) for x in (lse, d_lse))
    *arrays, result = [parts.tokens_last(x) for x in (q, k, v, d_out.astype(q.dtype), out)]
    marks = [parts.packed_marks(queries), parts.packed_marks(keys)]
    specs, of_rows = parts.specs_of(of, whole), of_lse.nbytes
    in_specs = [specs.queries, specs.keys, specs.keys, specs.queries]
    dq, sums = parts.call(
        parts.partial_kernel(_dq_kernel, of, whole=whole), "packed_attention_dq", of,
        parts.scalars_of(pairs, False, window), [*arrays, result, of_lse, of_d_lse, *marks],
        [*in_specs, specs.queries, specs.rows, specs.rows, specs.query_marks, specs.key_marks],
        [arrays[0], of_lse], [specs.queries, specs.rows],
        [*[pltpu.VMEM((of.h, columns), q.dtype)] * 2, pltpu.VMEM((1, columns), dtype),
         pltpu.VMEM((of.h, columns), dtype)],
        3, bytes_of_keys(of, whole, k) + 4 * q.nbytes + 3 * of_rows,
    )  # fmt: skip
    specs = parts.specs_of(of, False)
    in_specs = [specs.queries, specs.keys, specs.keys, specs.queries]
    dk, dv = parts.call(
        parts.partial_kernel(_dkv_kernel, of), "packed_attention_dkv", of,
        parts.scalars_of(pairs, True, window), [*arrays, of_lse, sums, *marks],
        [*in_specs, specs.rows, specs.rows, specs.query_marks, specs.key_marks], arrays[1:3],
        [specs.keys] * 2, [pltpu.VMEM((of.h, of.width), dtype)] * 2,
        4, 4 * k.nbytes + (2 * q.nbytes + 2 * of_rows) // of.L * of.attended // of.width,
    )  # fmt: skip
    return parts.tokens_first(dq, of), parts.tokens_first(dk, of), parts.tokens_first(dv, of)
