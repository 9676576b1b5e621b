"""Attention among packed tokens: rows, prompts with their completions, and trees, side by side in one sequence."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.implementations import by_platform, check_implementation, found
from jaxrl_kernels.packed_attention import pallas_passes, triton_parts, triton_passes
from jaxrl_kernels.packed_attention.blocks import LANES, BlockPairs, PackedTokens, block_pairs
from jaxrl_kernels.packed_attention.reference import MASKED, Numbers, blocked, reference, sizes_of
from jaxrl_kernels.partition import AnyMesh, Axis, check_apart, dividing, first_dividing, mesh_of, vary_together

Array = jax.Array

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
        return on_mesh(static, mesh, row_axis, head_axis, q, k, v, Where(queries, keys, None, jnp.int32(window)))

    def padded(x: jax.Array) -> jax.Array:
        missing = -x.shape[1] % LANES
        return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) if missing else x

    if L % LANES or S % LANES:
        pairs, q, k, v = None, padded(q), padded(k), padded(v)
        queries, keys = (PackedTokens(*map(padded, tokens)) for tokens in (queries, keys))
    pairs = block_pairs(queries, keys, window) if pairs is None else pairs
    out, lse = on_mesh(static, mesh, row_axis, head_axis, q, k, v, Where(queries, keys, pairs, jnp.int32(window)))
    return out[:, :L], lse[..., :L]


class Static(NamedTuple):
    """What is known before compilation."""

    numbers: Numbers
    attended: int | None
    implementation: str | None


class Where(NamedTuple):
    """What decides who attends to whom."""

    queries: PackedTokens
    keys: PackedTokens
    pairs: BlockPairs | None
    window: Array  # int32[]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(static: Static, q: Array, k: Array, v: Array, where: Where) -> tuple[Array, Array]:
    """Results and log-sum-exps on one device. The platform is chosen inside, so that all save the same residuals."""
    return _forward(static, q, k, v, where)[0]


def _in_jax(static: Static, q: Array, k: Array, v: Array, where: Where) -> tuple[Array, Array]:
    return blocked(q, k, v, where.queries, where.keys, where.window, static.numbers)


def _by_kernels(static: Static, xla: Any, tpu: Any, gpu: Any, *given: Any) -> Any:
    """A pass in JAX, by the kernels for TPU, or by those for GPUs where they serve these queries; interpreted, all.

    given: its arrays, of which the first two are q and k, and where.
    """

    def kernels(run: Any, *given: Any, interpret: bool) -> Any:
        *arrays, where = given
        of = sizes_of(arrays[0], arrays[1], static.numbers, static.attended, interpret)
        return run(*arrays, where.queries, where.keys, where.pairs, where.window, of)

    triton = partial(kernels, gpu) if static.implementation == "triton" or triton_parts.serves(given[0]) else None
    return by_platform(xla, partial(kernels, tpu), static.implementation, *given, triton=triton)


def _forward(static: Static, q: Array, k: Array, v: Array, where: Where) -> tuple[Any, Any]:
    in_jax = partial(_in_jax, static)
    out, lse = _by_kernels(static, in_jax, pallas_passes.forward, triton_passes.forward, q, k, v, where)
    return (out, lse), (q, k, v, out, lse, where)


def _backward(static: Static, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, out, lse, where = residuals

    def in_jax(q: Array, k: Array, v: Array, out: Array, lse: Array, d_out: Array, d_lse: Array, where: Where) -> Any:
        return jax.vjp(lambda q, k, v: _in_jax(static, q, k, v, where), q, k, v)[1]((d_out, d_lse))

    given = q, k, v, out, lse, *cotangents, where
    found = _by_kernels(static, in_jax, pallas_passes.backward, triton_passes.backward, *given)
    return *found, jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), where)


attend.defvjp(_forward, _backward)


def on_mesh(
    static: Static, mesh: AnyMesh | None, row_axis: Axis, head_axis: Axis, q: Array, k: Array, v: Array, where: Where
) -> tuple[Array, Array]:
    """`attend`, sharded over rows and key-value heads on a mesh."""
    if static.implementation == "reference":
        return reference(q, k, v, where.queries, where.keys, where.window, static.numbers)
    mesh = mesh_of(mesh, q, k, v, where)
    if mesh is None:
        return attend(static, q, k, v, where)
    rows, heads = dividing(mesh, row_axis, q.shape[0]), first_dividing(mesh, head_axis, k.shape[2])
    (L, h), S = q.shape[1::2], k.shape[1]

    def run(q: Array, k: Array, v: Array, where: Where) -> tuple[Array, Array]:
        q, k, v, where = vary_together(q, k, v, where)
        N = q.shape[0]
        out, lse = attend(static, q.reshape(N, L, -1, h), k.reshape(N, S, -1, h), v.reshape(N, S, -1, h), where)
        return out.reshape(N, L, -1), lse

    # Heads lie side by side at the borders, so that no device stores them with padding between.
    flat_q, flat_k, flat_v = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    by_heads, by_rows = jax.P(rows, None, heads), jax.P(rows)
    specs = jax.tree.map(lambda _: by_rows, where)._replace(window=jax.P())
    out, lse = jax.shard_map(
        run, mesh=mesh, in_specs=(by_heads, by_heads, by_heads, specs), out_specs=(by_heads, jax.P(rows, heads)),
        # Interpret mode does not track varying axes.
        check_vma=static.implementation not in ("pallas", "triton"),
    )(flat_q, flat_k, flat_v, where)  # fmt: skip
    return out.reshape(q.shape), lse


def check(q: Array, k: Array, v: Array, queries: PackedTokens, keys: PackedTokens, implementation: str | None) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    if q.ndim != 4 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be floating [N, L, H, h], {found(q)}")
    N, L, H, h = q.shape
    if k.ndim != 4 or k.shape[0] != N or k.shape[3] != h or k.dtype != q.dtype or H % max(k.shape[2], 1):
        raise ValueError(f"k must be {q.dtype}[{N}, S, K, {h}], where K divides {H}, {found(k)}")
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"v must be {k.dtype}{list(k.shape)}, as k is, {found(v)}")
    for name, tokens, length in (("queries", queries, L), ("keys", keys, k.shape[1])):
        for field, x in zip(PackedTokens._fields, tokens, strict=True):
            if x.shape != (N, length) or not jnp.issubdtype(x.dtype, jnp.integer):
                raise ValueError(f"{name}.{field} must be int32[{N}, {length}], {found(x)}")
