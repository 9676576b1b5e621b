"""Derivatives, choice of the implementation and sharding over a mesh."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.implementations import by_platform
from jaxrl_kernels.packed_attention import triton_backward, triton_forward, triton_parts
from jaxrl_kernels.packed_attention.blocks import BlockPairs, PackedTokens
from jaxrl_kernels.packed_attention.pallas_backward import backward
from jaxrl_kernels.packed_attention.pallas_forward import forward
from jaxrl_kernels.packed_attention.pallas_parts import sizes_of
from jaxrl_kernels.packed_attention.reference import Numbers, blocked, reference
from jaxrl_kernels.partition import AnyMesh, Axis, dividing, first_dividing, mesh_of, vary_together

Array = jax.Array


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


def _for_cuda(static: Static, q: Array, kernel: Any) -> Any:
    """The Triton kernel, or None if it does not serve these queries; interpreted it serves all."""
    return kernel if static.implementation == "triton" or triton_parts.serves(q) else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(static: Static, q: Array, k: Array, v: Array, where: Where) -> tuple[Array, Array]:
    """Results and log-sum-exps on one device. The platform is chosen inside, so that all save the same residuals."""
    return _forward(static, q, k, v, where)[0]


def _forward(static: Static, q: Array, k: Array, v: Array, where: Where) -> tuple[Any, Any]:
    def in_jax(q: Array, k: Array, v: Array, where: Where) -> tuple[Array, Array]:
        return blocked(q, k, v, where.queries, where.keys, where.window, static.numbers)

    def pallas(q: Array, k: Array, v: Array, where: Where, *, interpret: bool) -> tuple[Array, Array]:
        of = sizes_of(q, k, static.numbers, static.attended, interpret)
        assert where.pairs is not None
        return forward(q, k, v, where.queries, where.keys, where.pairs, where.window, of)

    def triton(q: Array, k: Array, v: Array, where: Where, *, interpret: bool) -> tuple[Array, Array]:
        of = triton_parts.sizes_of(q, k, static.numbers, static.attended, interpret)
        assert where.pairs is not None
        return triton_forward.forward(q, k, v, where.queries, where.keys, where.pairs.visits, where.window, of)

    out, lse = by_platform(in_jax, pallas, static.implementation, q, k, v, where, triton=_for_cuda(static, q, triton))
    return (out, lse), (q, k, v, out, lse, where)


def _backward(static: Static, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    q, k, v, out, lse, where = residuals

    def in_jax(q: Array, k: Array, v: Array, out: Array, lse: Array, d_out: Array, d_lse: Array, where: Where) -> Any:
        again = lambda q, k, v: blocked(q, k, v, where.queries, where.keys, where.window, static.numbers)  # noqa: E731
        return jax.vjp(again, q, k, v)[1]((d_out, d_lse))

    def pallas(
        q: Array, k: Array, v: Array, out: Array, lse: Array, d_out: Array, d_lse: Array, where: Where,
        *, interpret: bool,
    ) -> Any:  # fmt: skip
        of = sizes_of(q, k, static.numbers, static.attended, interpret)
        assert where.pairs is not None
        return backward(q, k, v, out, lse, d_out, d_lse, where.queries, where.keys, where.pairs, where.window, of)

    def triton(
        q: Array, k: Array, v: Array, out: Array, lse: Array, d_out: Array, d_lse: Array, where: Where,
        *, interpret: bool,
    ) -> Any:  # fmt: skip
        of = triton_parts.sizes_of(q, k, static.numbers, static.attended, interpret)
        assert where.pairs is not None
        tokens = where.queries, where.keys, where.pairs.visits
        return triton_backward.backward(q, k, v, out, lse, d_out, d_lse, *tokens, where.window, of)

    given = q, k, v, out, lse, *cotangents, where
    found = by_platform(in_jax, pallas, static.implementation, *given, triton=_for_cuda(static, q, triton))
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), where)
    return *found, nothing


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
    found = lambda x: f"found {x.dtype}{list(x.shape)}"  # noqa: E731
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
