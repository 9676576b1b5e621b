"""Attention among packed tokens: rows, prompts with their completions, and trees, side by side in one sequence."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import check_implementation
from jaxrl_kernels.packed_attention.blocks import LANES, BlockPairs, PackedTokens, block_pairs
from jaxrl_kernels.packed_attention.dispatch import Static, Where, check, on_mesh
from jaxrl_kernels.packed_attention.reference import MASKED, Numbers
from jaxrl_kernels.partition import AnyMesh, Axis, check_apart

__all__ = ["BlockPairs", "PackedTokens", "block_pairs", "packed_attention"]


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: PackedTokens,
    keys: PackedTokens | None = None,
    *,
    pairs: BlockPairs | None = None,
    query_scale: float = 1.0,
    softcap: float = 0.0,
    window: int | jax.Array = 0,
    attended: int | None = None,
    implementation: str | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = ("data", "fsdp", "expert"),
    head_axis: Axis = ("tensor", "sequence"),
) -> tuple[jax.Array, jax.Array]:
    """Grouped-query attention of packed tokens, and its log-sum-exps; differentiable with respect to q, k and v.

    A query attends to a key if the query's number `enter` is in the key's interval [enter, leave) and, with a window,
    its position is less than `window` above the key's. Numbers that follow a tree in depth-first order make this
    attention to the ancestors and to itself; a tree may be a prompt and its completions. With
    `cap(x) = softcap * tanh(x / softcap)` and logits `z_s = cap(query_scale * q . k_s)` over the keys s attended to,
    the result is `sum_s exp(z_s - lse) v_s` with `lse = log sum_s exp(z_s)`, or 0 and lse = -1e30 where there is none.
    Results for separate sets of keys combine by their log-sum-exps, which are differentiable too.

    Pairs of blocks in which no query attends to a key are skipped (`block_pairs`), and no array has the size of
    queries times keys. N sequences of L queries and S keys, H query heads, K key-value heads, h head size.

    Args:
      q: [N, L, H, h], floating; products accumulate in float32 (float64 of float64).
      k, v: [N, S, K, h], the dtype of q; K divides H. Finite everywhere.
      queries, keys: who attends to whom, int32[N, L] and int32[N, S]; keys=None: the same as queries.
      pairs: the result of `block_pairs(queries, keys, window)` if it is known already, as for all layers of a model.
      query_scale: factor of the logits. Static.
      softcap: bound of the logits (Gemma 2); 0 for none. Static.
      window: number of positions that a token attends to, including itself; 0 for all. It may be int32[].
      attended: how many pairs of a query and a key attend to each other in a sequence, for the estimated cost; None:
        half of all. Static.
      implementation: "pallas", "xla" (blocks of queries), "reference" or None, see `implementations`. The Pallas
        kernels need L and S to be multiples of 128; other lengths are padded, which copies the arrays. Those for GPUs
        do not serve float64 and h > 256: None is "xla" then.
      mesh: the devices, if the types of the arrays do not contain them (`partition.mesh_of`).
      row_axis, head_axis: mesh axes over which sequences and heads are sharded, if the mesh has them and they divide N
        and K evenly.

    Returns:
      [N, L, H, h] in the dtype of q, and log-sum-exps f32[N, H, L].

    Raises:
      ValueError: shapes or dtypes do not match, a number is out of range, or the implementation is unknown.

    >>> q, k = jnp.ones((1, 2, 1, 1)), jnp.log(jnp.array([1.0, 3.0])).reshape(1, 2, 1, 1)
    >>> v = jnp.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    >>> row = PackedTokens(jnp.array([[1, 2]]), jnp.array([[3, 3]]), jnp.array([[0, 1]]))  # the second sees both
    >>> out, lse = packed_attention(q, k, v, row)
    >>> print([f"{x:.3f}" for x in out.ravel()], [f"{x:.3f}" for x in jnp.exp(lse).ravel()])
    ['0.000', '0.750'] ['1.000', '4.000']
    """
    check_implementation(implementation)
    check_apart(row_axis, head_axis)
    keys = queries if keys is None else keys
    check(q, k, v, queries, keys, implementation)
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or above, found {softcap}")
    if isinstance(window, int) and window < 0:
        raise ValueError(f"window must be 0 (none) or above, found {window}")
    queries, keys = (PackedTokens(*(x.astype(jnp.int32) for x in tokens)) for tokens in (queries, keys))
    static = Static(Numbers(float(query_scale), float(softcap)), attended, implementation)
    (N, L, H, _), S = q.shape, k.shape[1]
    if math.prod(q.shape) * S == 0:
        return jnp.zeros_like(q), jnp.full((N, H, L), MASKED, jnp.promote_types(q.dtype, jnp.float32))
    if implementation in ("xla", "reference"):
        where = Where(queries, keys, None, jnp.int32(window))
        return on_mesh(static, mesh, row_axis, head_axis, q, k, v, where)

    def padded(x: jax.Array) -> jax.Array:
        missing = -x.shape[1] % LANES
        return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x

    if L % LANES or S % LANES:
        pairs, q, k, v = None, padded(q), padded(k), padded(v)
        queries, keys = (PackedTokens(*map(padded, tokens)) for tokens in (queries, keys))
    pairs = block_pairs(queries, keys, window) if pairs is None else pairs
    out, lse = on_mesh(static, mesh, row_axis, head_axis, q, k, v, Where(queries, keys, pairs, jnp.int32(window)))
    return out[:, :L], lse[..., :L]
