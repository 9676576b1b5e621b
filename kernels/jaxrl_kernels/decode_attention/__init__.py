"""Attention of newest tokens: to a prompt's cache that many rows share, read once for all, and to a row's own ring."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.decode_attention.dispatch import check_cache, check_numbers, on_mesh
from jaxrl_kernels.decode_attention.pallas_own import pallas_own
from jaxrl_kernels.decode_attention.pallas_prompts import pallas_prompts
from jaxrl_kernels.decode_attention.reference import (
    MASKED,
    OwnAttention,
    PartialAttention,
    merge,
    partial_attention,
    reference_own,
    reference_prompts,
    visible_own,
    visible_prompt,
)
from jaxrl_kernels.partition import AnyMesh, Axis, check_apart

__all__ = [
    "MASKED",
    "OwnAttention",
    "PartialAttention",
    "decode_attention",
    "merge",
    "own_attention",
    "partial_attention",
    "visible_own",
    "visible_prompt",
]


def decode_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    position: jax.Array,
    *,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    query_scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
    implementation: str | None = None,
    tile: int | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = "data",
    head_axis: Axis = "tensor",
) -> PartialAttention:
    """Attention of one token of each row to its prompt, for P prompt slots that W rows each continue.

    With `cap(x) = softcap * tanh(x / softcap)` and logits `z_s = cap(query_scale * q . key_s)` over the columns s that
    a query sees, `m = max_s z_s`, `l = sum_s exp(z_s - m)` and `acc = sum_s exp(z_s - m) value_s`; the attention's
    result is acc / l, and `merge` puts two such parts together (cascade attention).

    A slot's columns hold the last S tokens of a prompt of `length` tokens, from its first column on: column s holds
    the token at max(length - S, 0) + s, and is seen if that is below length and, with a window, more than
    position - window. K is the number of key-value heads, R of query heads of each, h the head size.

    Has no derivative by the kernel: it is for sampling.

    Args:
      q: [P, K, W, R, h] queries, float32 or bfloat16; products are summed in float32.
      keys: [P, K, h, S], floating or int8.
      values: [P, K, S, h], the dtype of the keys. Entries of columns that no row sees must be finite.
      length: int32[P], tokens of each prompt; 0 for an empty slot.
      position: int32[P, W], of the rows' tokens; plays a part with a window only.
      key_scale, value_scale: f32[P, K, S] or None, what each key and value is to be multiplied with; both or neither.
      query_scale: of the logits. Static.
      softcap: 0 for none, else the bound of the logits (Gemma 2). Static.
      window: 0 for none, else how many positions back a token sees, itself included. Static.
      implementation: "pallas" (tiles of keys and values are read once and logits do not leave the core), "xla",
        "reference" or None, as `implementations` says; here xla is the formula too, so both names mean the same.
      tile: columns at a time of the kernel, a multiple of 128; None for as many as fit. Static.
      mesh: the devices, where the types of the arrays do not name them (`partition.mesh_of`).
      row_axis, head_axis: mesh axes over which prompt slots (with their rows) and heads are cut, where the mesh has
        them and they divide P and K evenly.

    Returns:
      acc f32[P, K, W, R, h], m and l f32[P, K, W, R]. Where nothing is seen m is MASKED (-1e30),
      and the sums, which differ between implementations, are finite and count nothing in `merge`.

    Raises:
      ValueError: shapes or dtypes do not fit, a number is out of range, or the implementation is not known.

    >>> keys = jnp.log(jnp.array([1.0, 3.0, 5.0])).reshape(1, 1, 1, 3)
    >>> values = jnp.array([0.0, 1.0, 9.0]).reshape(1, 1, 3, 1)
    >>> q, position = jnp.ones((1, 1, 1, 1, 1)), jnp.array([[2]])
    >>> part = decode_attention(q, keys, values, jnp.array([2]), position)
    >>> print(f"{(part.acc[..., 0] / part.l).item():.4f} {jnp.exp(part.m).item():.4f}")
    0.7500 3.0000
    """
    check_numbers(softcap, window, implementation, tile)
    check_apart(row_axis, head_axis)
    if q.ndim != 5 or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q must be float32 or bfloat16 [P, K, W, R, h], found {q.dtype}{list(q.shape)}")
    P, K, W, _, h = q.shape
    check_cache((P, K, h), keys, values, key_scale, value_scale)
    for name, x, shape in (("length", length, (P,)), ("position", position, (P, W))):
        if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be int32{list(shape)}, found {x.dtype}{list(x.shape)}")
    numbers: dict[str, Any] = {"query_scale": float(query_scale), "softcap": float(softcap), "window": window}
    operands = q, keys, values, length.astype(jnp.int32), position.astype(jnp.int32), key_scale, value_scale
    kernels = partial(reference_prompts, **numbers), partial(pallas_prompts, **numbers, tile=tile)
    dimensions = "NK", "NK", "NK", "N", "N", "NK", "NK"
    return on_mesh(*kernels, implementation, mesh, row_axis, head_axis, operands, dimensions)


def own_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    count: jax.Array,
    step: jax.Array,
    prompt: PartialAttention,
    *,
    new_scales: tuple[jax.Array, jax.Array] | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    query_scale: float = 1.0,
    softcap: float = 0.0,
    window: int = 0,
    implementation: str | None = None,
    tile: int | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = "data",
    head_axis: Axis = "tensor",
) -> OwnAttention:
    """Attention of the newest token of each of B rows to its prompt and its own tokens, which are kept in a ring.

    At step s every row writes its token to column s mod S, so column c holds the token of age (step - c) mod S, which
    is the row's own, and seen, if the age is at most `count` and, with a window, below it. The newest token's key and
    value are written first. On TPU the ring is written in place if it is donated, or the carry of a loop.

    Args:
      q: [B, K, R, h] queries, float32 or bfloat16.
      k, v: [B, K, h], key and value of the newest tokens, in the dtype of the ring.
      keys: [B, K, h, S], floating or int8; the ring.
      values: [B, K, S, h], the dtype of the keys. Entries of columns that are not seen must be finite.
      count: int32[B], own tokens of each row before the newest one; 0 to S - 1.
      step: int32[], 0 or above, of the newest tokens.
      prompt: what `decode_attention` gave for the rows, acc f32[B, K, R, h], m and l f32[B, K, R].
      new_scales, scales: what keys and values are to be multiplied with, f32[B, K] of the newest, f32[B, K, S] of the
        ring; both or neither.
      query_scale, softcap, implementation, tile, mesh, head_axis: as of `decode_attention`.
      row_axis: mesh axis over which rows are cut, where it divides B evenly.
      window: 0 for none, else how many tokens back are seen, the newest included. Static.

    Returns:
      The result [B, K, R, h] in the dtype of q, and the ring with the newest token.

    Raises:
      ValueError: shapes or dtypes do not fit, a number is out of range, or the implementation is not known.

    >>> keys = jnp.log(jnp.array([9.0, 3.0, 5.0])).reshape(1, 1, 1, 3)  # column 0 is step 3's, column 2 step 2's
    >>> values = jnp.array([9.0, 1.0, 6.0]).reshape(1, 1, 3, 1)
    >>> k, v, nothing = jnp.zeros((1, 1, 1)), jnp.zeros((1, 1, 1)), PartialAttention(0.0, jnp.array(MASKED), 0.0)
    >>> nothing = jax.tree.map(lambda x, n: jnp.full((1,) * n, x), nothing, PartialAttention(4, 3, 3))
    >>> own = own_attention(jnp.ones((1, 1, 1, 1)), k, v, keys, values, jnp.array([1]), jnp.int32(3), nothing)
    >>> print(own.result.item(), own.values.ravel())
    5.0 [0. 1. 6.]
    """
    check_numbers(softcap, window, implementation, tile)
    check_apart(row_axis, head_axis)
    if q.ndim != 4 or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q must be float32 or bfloat16 [B, K, R, h], found {q.dtype}{list(q.shape)}")
    B, K, R, h = q.shape
    check_cache((B, K, h), keys, values, *(scales or (None, None)))
    for name, x, shape in (("count", count, (B,)), ("step", step, ())):
        if jnp.shape(x) != shape or not jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer):
            raise ValueError(f"{name} must be int32{list(shape)}, found {jnp.asarray(x).dtype}{list(jnp.shape(x))}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != (B, K, h) or x.dtype != keys.dtype:
            raise ValueError(f"{name} must be {keys.dtype}[{B}, {K}, {h}], found {x.dtype}{list(x.shape)}")
    for name, x, sums in zip(PartialAttention._fields, prompt, ((B, K, R, h), (B, K, R), (B, K, R)), strict=True):
        if x.shape != sums or x.dtype != jnp.float32:
            raise ValueError(f"prompt.{name} must be float32{list(sums)}, found {x.dtype}{list(x.shape)}")
    if (new_scales is None) != (scales is None):
        raise ValueError("give new_scales and scales, or neither of them")
    for x in new_scales or ():
        if x.shape != (B, K):
            raise ValueError(f"new_scales must be float32[{B}, {K}], found {x.dtype}{list(x.shape)}")
    numbers: dict[str, Any] = {"query_scale": float(query_scale), "softcap": float(softcap), "window": window}
    count, step = count.astype(jnp.int32), jnp.asarray(step, jnp.int32)
    operands = q, k, v, keys, values, count, step, prompt, new_scales, scales
    kernels = partial(reference_own, **numbers), partial(pallas_own, **numbers, tile=tile)
    dimensions = "NK", "NK", "NK", "NK", "NK", "N", "", "NK", "NK", "NK"
    return on_mesh(*kernels, implementation, mesh, row_axis, head_axis, operands, dimensions)
