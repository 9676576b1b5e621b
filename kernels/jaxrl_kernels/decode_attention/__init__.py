"""Attention in decoding: to a prompt's cache, shared and read once for many rows, and to a row's ring KV cache."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_kernels.decode_attention.pallas_own import pallas_own
from jaxrl_kernels.decode_attention.pallas_prompts import pallas_prompts
from jaxrl_kernels.decode_attention.reference import (
    MASKED,
    Numbers,
    OwnAttention,
    PartialAttention,
    merge,
    partial_attention,
    reference_own,
    reference_prompts,
    visible_own,
    visible_prompt,
)
from jaxrl_kernels.decode_attention.tiles import LANES
from jaxrl_kernels.implementations import by_platform, check_implementation, found
from jaxrl_kernels.partition import ROWS, AnyMesh, Axis, check_apart, dividing, mesh_of, vary_together

Result = TypeVar("Result")

__all__ = [
    "MASKED", "OwnAttention", "PartialAttention", "decode_attention", "merge", "own_attention", "partial_attention",
    "visible_own", "visible_prompt",
]  # fmt: skip


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
    row_axis: Axis = ROWS,
    head_axis: Axis = "tensor",
) -> PartialAttention:
    """Attention of one token of each row to its prompt, for P prompt slots with W rows each.

    With `cap(x) = softcap * tanh(x / softcap)` and logits `z_s = cap(query_scale * q . key_s)` over the columns s that
    a query attends to, this returns `m = max_s z_s`, `l = sum_s exp(z_s - m)` and `acc = sum_s exp(z_s - m) value_s`.
    The result of attention is acc / l, and `merge` combines two such partial results (cascade attention).

    The columns of a slot are the last S tokens of a prompt of `length` tokens: column s is the token at position
    max(length - S, 0) + s, which is attended to if it is below length and, with a window, above position - window. K is
    the number of key-value heads, R of query heads for each, h the head size.

    The kernel has no derivative: it is for sampling.

    Args:
      q: [P, K, W, R, h] queries, float32 or bfloat16; products accumulate in float32.
      keys: [P, K, h, S], floating or int8.
      values: [P, K, S, h], the dtype of the keys. Entries of columns that no row attends to must be finite.
      length: int32[P], tokens of each prompt; 0 for an empty slot.
      position: int32[P, W], positions of the rows' tokens; only used with a window.
      key_scale, value_scale: f32[P, K, S] or None, factors of each key and value; both or neither.
      query_scale: factor of the logits. Static.
      softcap: bound of the logits (Gemma 2); 0 for none. Static.
      window: number of positions that a token attends to, including itself; 0 for all. Static.
      implementation: "pallas" (keys and values are read once, and logits stay in VMEM), "xla", "reference" or None, see
        `implementations`; "xla" and "reference" are the same here.
      tile: columns per tile of the kernel, a multiple of 128; None for as many as fit. Static.
      mesh: the devices, if the types of the arrays do not contain them (`partition.mesh_of`).
      row_axis, head_axis: mesh axes over which prompt slots (with their rows) and heads are sharded, if the mesh has
        them and they divide P and K evenly.

    Returns:
      acc f32[P, K, W, R, h], m and l f32[P, K, W, R]. Where no column is attended to, m is MASKED (-1e30), and acc and
      l, which differ between implementations, are finite and have weight 0 in `merge`.

    Raises:
      ValueError: shapes or dtypes do not match, a number is out of range, or the implementation is unknown.

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
        raise ValueError(f"q must be float32 or bfloat16 [P, K, W, R, h], {found(q)}")
    P, K, W, _, h = q.shape
    check_cache((P, K, h), keys, values, key_scale, value_scale)
    for name, x, shape in (("length", length, (P,)), ("position", position, (P, W))):
        if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be int32{list(shape)}, {found(x)}")
    numbers = Numbers(float(query_scale), float(softcap), window)
    operands = q, keys, values, length.astype(jnp.int32), position.astype(jnp.int32), key_scale, value_scale
    kernels = partial(reference_prompts, numbers=numbers), partial(pallas_prompts, numbers=numbers, tile=tile)
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
    row_axis: Axis = ROWS,
    head_axis: Axis = "tensor",
) -> OwnAttention:
    """Attention of the newest token of each of B rows to its prompt and to its own tokens in a ring KV cache.

    At step s every row writes its token to column s mod S, so column c holds the token of age (step - c) mod S. It is
    attended to if the age is at most `count` and, with a window, below the window. The newest token's key and value are
    written first. On TPU the ring KV cache is updated in place if it is donated or carried by a loop.

    Args:
      q: [B, K, R, h] queries, float32 or bfloat16.
      k, v: [B, K, h], key and value of the newest tokens, in the dtype of the ring KV cache.
      keys: [B, K, h, S], floating or int8, of the ring KV cache.
      values: [B, K, S, h], the dtype of the keys. Entries of columns that are not attended to must be finite.
      count: int32[B], own tokens of each row before the newest one; 0 to S - 1.
      step: int32[], step of the newest tokens, at least 0.
      prompt: result of `decode_attention` for the rows, acc f32[B, K, R, h], m and l f32[B, K, R].
      new_scales, scales: factors of keys and values, f32[B, K] for the newest tokens and f32[B, K, S] for the ring KV
        cache; both or neither.
      query_scale, softcap, implementation, tile, mesh, head_axis: as in `decode_attention`.
      row_axis: mesh axis over which rows are sharded, if it divides B evenly.
      window: number of tokens attended to, including the newest; 0 for all. Static.

    Returns:
      The result [B, K, R, h] in the dtype of q, and the ring KV cache with the newest token.

    Raises:
      ValueError: shapes or dtypes do not match, a number is out of range, or the implementation is unknown.

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
        raise ValueError(f"q must be float32 or bfloat16 [B, K, R, h], {found(q)}")
    B, K, R, h = q.shape
    check_cache((B, K, h), keys, values, *(scales or (None, None)))
    for name, x, shape in (("count", count, (B,)), ("step", step, ())):
        if jnp.shape(x) != shape or not jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer):
            raise ValueError(f"{name} must be int32{list(shape)}, found {jnp.asarray(x).dtype}{list(jnp.shape(x))}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != (B, K, h) or x.dtype != keys.dtype:
            raise ValueError(f"{name} must be {keys.dtype}[{B}, {K}, {h}], {found(x)}")
    for name, x, sums in zip(PartialAttention._fields, prompt, ((B, K, R, h), (B, K, R), (B, K, R)), strict=True):
        if x.shape != sums or x.dtype != jnp.float32:
            raise ValueError(f"prompt.{name} must be float32{list(sums)}, {found(x)}")
    if (new_scales is None) != (scales is None):
        raise ValueError("pass both new_scales and scales, or neither")
    for x in new_scales or ():
        if x.shape != (B, K):
            raise ValueError(f"new_scales must be float32[{B}, {K}], {found(x)}")
    numbers = Numbers(float(query_scale), float(softcap), window)
    count, step = count.astype(jnp.int32), jnp.asarray(step, jnp.int32)
    operands = q, k, v, keys, values, count, step, prompt, new_scales, scales
    kernels = partial(reference_own, numbers=numbers), partial(pallas_own, numbers=numbers, tile=tile)
    dimensions = "NK", "NK", "NK", "NK", "NK", "N", "", "NK", "NK", "NK"
    return on_mesh(*kernels, implementation, mesh, row_axis, head_axis, operands, dimensions)


def on_mesh(
    reference: Callable[..., Result],
    kernel: Callable[..., Result],
    implementation: str | None,
    mesh: AnyMesh | None,
    row_axis: Axis,
    head_axis: Axis,
    operands: tuple[Any, ...],
    dimensions: tuple[str, ...],
) -> Result:
    """Run the reference or the kernel, sharded over rows (or prompt slots) and heads on a mesh.

    operands: the queries first. dimensions: the leading dimensions of each operand (a pytree): "NK" for rows or slots
    and then heads, "N" for rows or slots, or "".
    """
    if implementation == "reference":
        return reference(*operands)

    def pallas(*operands: Any, interpret: bool) -> Result:
        # A Pallas kernel has no differentiation rule.
        return kernel(*jax.lax.stop_gradient(vary_together(*operands)), interpret=interpret)

    empty = 0 in operands[0].shape
    run = partial(by_platform, reference, pallas, "xla" if empty else implementation)
    mesh = mesh_of(mesh, operands)
    if mesh is None or empty:
        return run(*operands)
    rows, heads = operands[0].shape[:2]
    axes = {"N": dividing(mesh, row_axis, rows), "K": dividing(mesh, head_axis, heads)}
    specs = tuple(jax.P(*(axes[name] for name in names)) for names in dimensions)
    # Interpret mode does not track varying axes.
    track = implementation != "pallas"
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=track)(*operands)


def check_numbers(softcap: float, window: int, implementation: str | None, tile: int | None) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    check_implementation(implementation)
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or above, found {softcap}")
    if window < 0:
        raise ValueError(f"window must be 0 (none) or above, found {window}")
    if tile is not None and (tile < 1 or tile % LANES):
        raise ValueError(f"tile must be a multiple of {LANES}, found {tile}")


def check_cache(
    shape: tuple[int, int, int],
    keys: jax.Array,
    values: jax.Array,
    key_scale: jax.Array | None,
    value_scale: jax.Array | None,
) -> None:
    """As `check_numbers`, for a cache; shape: (slots or rows, heads, head size) of the queries."""
    N, K, h = shape
    floating = jnp.issubdtype(keys.dtype, jnp.floating)
    if keys.ndim != 4 or keys.shape[:3] != shape or keys.shape[3] < 1 or not (floating or keys.dtype == jnp.int8):
        raise ValueError(f"keys must be floating or int8 [{N}, {K}, {h}, S], {found(keys)}")
    S = keys.shape[3]
    if values.shape != (N, K, S, h) or values.dtype != keys.dtype:
        raise ValueError(f"values must be {keys.dtype}[{N}, {K}, {S}, {h}], as the keys are, {found(values)}")
    if (key_scale is None) != (value_scale is None):
        raise ValueError("pass both key_scale and value_scale, or neither")
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None and scale.shape != (N, K, S):
            raise ValueError(f"{name} must be float32[{N}, {K}, {S}], {found(scale)}")
