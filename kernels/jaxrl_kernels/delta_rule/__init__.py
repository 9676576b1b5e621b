"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) in chunks whose paths may branch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.delta_rule import blocked, pallas_kernel
from jaxrl_kernels.delta_rule.chunk import DeltaInputs, Shares, inverse_of_one_plus, step
from jaxrl_kernels.implementations import by_platform, check_implementation
from jaxrl_kernels.partition import AnyMesh, Axis, check_apart, dividing, mesh_of, vary_together

Array = jax.Array
__all__ = ["DeltaInputs", "Shares", "delta_rule", "inverse_of_one_plus", "step"]


def delta_rule(
    x: DeltaInputs,
    entry: Array,
    starts: Array,
    shares: Shares | None = None,
    *,
    implementation: str | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = ("data", "fsdp", "expert"),
    head_axis: Axis = ("tensor", "sequence"),
) -> tuple[Array, Array]:
    """Outputs [R, n, H, C, v] of tokens in chunks, and the states [R, n, H, k, v] after each chunk; differentiable.

    A head's state S [k, v] goes from token to token. With key k_t, value v_t, decay a_t = exp(g_t), rate b_t,

        S_t = a_t S_{t-1} + b_t k_t (v_t - a_t k_t S_{t-1})^T,    o_t = q_t S_t.

    Chunks need each other's states alone, and memory is linear in tokens: the backward pass keeps the state after each
    chunk and computes all else of a chunk again, so that what is between stays near the processor.

    Args:
      x: n chunks of C tokens of each of R rows, [R, n, H, C, k], [R, n, H, C, v] and [R, n, H, 1, C], floating; g and
        beta float32 (or float64), as states are. k of length at most 1 and g at most 0.
      entry: int32[R, n], what each chunk begins with: the state after an earlier chunk of the row (its number), one of
        the row's starts (n + its number), or zeros (-1). Paths that branch share the chunks before.
      starts: [R, s, H, k, v], in the dtype of g; s may be 0.
      shares: where chunks hold tokens of several paths, which are of one. None: all of a chunk are.
      implementation: "pallas" (TPU), "xla" or None, see `implementations`. A row of more chunks than a TPU can keep the
        states of takes "xla".
      mesh, row_axis, head_axis: as for `packed_attention`. A row's tokens are on one device, with some of its heads:
        where they are sharded over "sequence", they change places with heads on the way in and out.

    Raises:
      ValueError: shapes or dtypes do not match, or the implementation is unknown.

    >>> one = jnp.ones((1, 1, 1, 2, 1))  # two tokens with q = k = v = 1
    >>> x = DeltaInputs(one, one, one, jnp.zeros((1, 1, 1, 1, 2)), jnp.full((1, 1, 1, 1, 2), 0.5))
    >>> out, after = delta_rule(x, jnp.array([[-1]]), jnp.zeros((1, 0, 1, 1, 1)))
    >>> print(out.ravel(), after.ravel())  # half of the way to 1, twice
    [0.5  0.75] [0.75]
    """
    check_implementation(implementation)
    check_apart(row_axis, head_axis)
    _check(x, entry, starts)
    R, n = entry.shape
    starts = jnp.pad(starts, ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0)))  # the last: zeros
    places = jnp.where(entry < 0, n + starts.shape[1] - 1, entry).astype(jnp.int32)
    mesh = mesh_of(mesh, x, places, starts)
    if mesh is None:
        return _chunked(implementation, x, places, starts, shares)
    rows, names = dividing(mesh, row_axis, R), (head_axis,) if isinstance(head_axis, str) else head_axis
    divided = (dividing(mesh, names[:end], x.q.shape[2]) for end in range(len(names), 0, -1))
    heads = next((axes for axes in divided if axes is not None), None)

    def run(*arrays: Any) -> tuple[Array, Array]:
        return _chunked(implementation, *vary_together(*arrays))

    by_both, by_rows = jax.P(rows, None, heads), jax.P(rows)
    specs = (
        jax.tree.map(lambda _: by_both, x), by_rows, by_both, jax.tree.map(lambda _: by_rows, shares),
    )  # fmt: skip
    return jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=(by_both, by_both),
        check_vma=implementation != "pallas",  # interpret mode does not track varying axes
    )(x, places, starts, shares)  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    implementation: str | None, x: DeltaInputs, places: Array, starts: Array, shares: Shares | None
) -> tuple[Array, Array]:
    return _forward(implementation, x, places, starts, shares)[0]


def _by_platform(implementation: str | None, xla: Any, pallas: Any, given: Sequence[Any]) -> Any:
    of = pallas_kernel.sizes_of(given[0], given[2])
    return by_platform(xla, partial(pallas, of=of), "xla" if of is None else implementation, *given)


def _forward(
    implementation: str | None, x: DeltaInputs, places: Array, starts: Array, shares: Shares | None
) -> tuple[tuple[Array, Array], Any]:
    given = (x, shares), places, starts
    found = _by_platform(implementation, blocked.forward, pallas_kernel.forward, given)
    return found, (x, places, starts, shares, found[1])


def _backward(implementation: str | None, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    x, places, starts, shares, after = residuals
    given = (x, shares), places, starts, after, *cotangents
    d_x, d_starts = _by_platform(implementation, blocked.backward, pallas_kernel.backward, given)
    return d_x, np.zeros(places.shape, jax.dtypes.float0), d_starts, jax.tree.map(jnp.zeros_like, shares)


_chunked.defvjp(_forward, _backward)


def _check(x: DeltaInputs, entry: Array, starts: Array) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    if x.q.ndim != 5 or not jnp.issubdtype(x.q.dtype, jnp.floating):
        raise ValueError(f"q must be floating [R, n, H, C, k], found {x.q.dtype}{list(x.q.shape)}")
    R, n, H, C, k = x.q.shape
    v = x.v.shape[-1]
    shapes = {"k": (R, n, H, C, k), "v": (R, n, H, C, v), "g": (R, n, H, 1, C), "beta": (R, n, H, 1, C)}
    for name, shape in shapes.items():
        found, dtype = getattr(x, name), x.q.dtype if name in ("k", "v") else starts.dtype
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}{list(shape)}, found {found.dtype}{list(found.shape)}")
    if entry.shape != (R, n) or not jnp.issubdtype(entry.dtype, jnp.integer):
        raise ValueError(f"entry must be int32[{R}, {n}], found {entry.dtype}{list(entry.shape)}")
    if starts.shape[:1] + starts.shape[2:] != (R, H, k, v) or not jnp.issubdtype(starts.dtype, jnp.floating):
        raise ValueError(f"starts must be floating [{R}, s, {H}, {k}, {v}], found {starts.dtype}{list(starts.shape)}")
