"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) in chunks whose paths may branch."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.delta_rule import chunk, pallas_kernel
from jaxrl_kernels.delta_rule.chunk import DeltaInputs, Shares
from jaxrl_kernels.implementations import by_platform, check_implementation, found
from jaxrl_kernels.partition import AnyMesh, Axis, check_apart, dividing, first_dividing, mesh_of, vary_together

Array = jax.Array
__all__ = ["DeltaInputs", "Shares", "delta_rule"]


def delta_rule(
    x: DeltaInputs,
    entry: Array,
    starts: Array,
    shares: Shares | None = None,
    *,
    branches: int | None = None,
    implementation: str | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = ("data", "fsdp", "expert"),
    head_axis: Axis = ("tensor", "sequence"),
) -> tuple[Array, Array]:
    """Outputs [R, n, C, H, v] of tokens in chunks, and the states [R, H, k, v] after the last chunk; differentiable.

    A head's state S [k, v] goes from token to token. With key k_t, value v_t, decay a_t = exp(g_t), rate b_t,

        S_t = a_t S_{t-1} + b_t k_t (v_t - a_t k_t S_{t-1})^T,    o_t = q_t S_t.

    Chunks need each other's states alone, and memory is linear in tokens: the backward pass keeps the state after each
    chunk and computes all else of a chunk again, so that what is between stays near the processor.

    Args:
      x: n chunks of C tokens of each of R rows, q and k [R, n, C, K, k], v [R, n, C, H, v], floating, and g and beta
        [R, n, C, H], float32 (or float64), as states are. k of length at most 1 and g at most 0. Heads of values share
        those of keys: H is a multiple of K.
      entry: int32[R, n], what each chunk begins with: the state after an earlier chunk of the row (its number), one of
        the row's starts (n + its number), or zeros (-1). Paths that branch share the chunks before.
      starts: [R, s, H, k, v], in the dtype of g; s may be 0.
      shares: where chunks hold tokens of several paths, which are of one. None: all of a chunk are.
      branches: after how many chunks of a row, at most, another chunk than the next one begins with their state
        (static); None: any number. The kernel keeps as many states on the chip.
      implementation: "pallas" (TPU), "xla" or None, see `implementations`. None takes "xla" on TPUs where these states
        are too many, or sizes of keys or values no multiples of the chip's lanes.
      mesh, row_axis, head_axis: as for `packed_attention`. A row's tokens are on one device, with some of its heads:
        where they are sharded over "sequence", they change places with heads on the way in and out.

    Raises:
      ValueError: shapes or dtypes do not match, or the implementation is unknown.

    >>> one = jnp.ones((1, 1, 2, 1, 1))  # two tokens with q = k = v = 1
    >>> x = DeltaInputs(one, one, one, jnp.zeros((1, 1, 2, 1)), jnp.full((1, 1, 2, 1), 0.5))
    >>> out, last = delta_rule(x, jnp.array([[-1]]), jnp.zeros((1, 0, 1, 1, 1)))
    >>> print(out.ravel(), last.ravel())  # half of the way to 1, twice
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
        return _chunked(implementation, branches, (x, shares), places, starts)
    rows, heads = dividing(mesh, row_axis, R), first_dividing(mesh, head_axis, x.v.shape[3])
    if heads is not None:  # each device has the heads of keys that its own of values share
        K = x.q.shape[3]
        devices = math.prod(mesh.shape[name] for name in ((heads,) if isinstance(heads, str) else heads))
        copies = math.lcm(K, devices) // K
        x = x._replace(q=jnp.repeat(x.q, copies, axis=3), k=jnp.repeat(x.k, copies, axis=3))

    def run(*arrays: Any) -> tuple[Array, Array]:
        return _chunked(implementation, branches, *vary_together(*arrays))

    tokens, states, by_rows = jax.P(rows, None, None, heads), jax.P(rows, None, heads), jax.P(rows)
    return jax.shard_map(
        run, mesh=mesh, in_specs=((tokens, by_rows), by_rows, states), out_specs=(tokens, jax.P(rows, heads)),
        check_vma=implementation != "pallas",  # interpret mode does not track varying axes
    )((x, shares), places, starts)  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(implementation: str | None, branches: int | None, *given: Any) -> tuple[Array, Array]:
    """given: the inputs and shares, places and starts, as `chunk.forward` takes them."""
    kernel = partial(pallas_kernel.forward, states=False)
    return _by_platform(implementation, branches, lambda *given: chunk.forward(*given)[:2], kernel, given)


def _by_platform(implementation: str | None, branches: int | None, xla: Any, pallas: Any, given: Any) -> Any:
    of = pallas_kernel.sizes_of(given[0], given[2], branches)
    if of is None or (implementation is None and not of.aligned):
        implementation = "xla"
    return by_platform(xla, partial(pallas, of=of), implementation, *given)


def _forward(implementation: str | None, branches: int | None, *given: Any) -> tuple[tuple[Array, Array], Any]:
    out, last, after = _by_platform(implementation, branches, chunk.forward, pallas_kernel.forward, given)
    return (out, last), (*given, after)


def _backward(
    implementation: str | None, branches: int | None, residuals: Any, cotangents: tuple[Array, Array]
) -> tuple[Any, ...]:
    (_, shares), places, *_ = residuals
    given = *residuals, *cotangents
    d_x, d_starts = _by_platform(implementation, branches, chunk.backward, pallas_kernel.backward, given)
    return (d_x, jax.tree.map(jnp.zeros_like, shares)), np.zeros(places.shape, jax.dtypes.float0), d_starts


_chunked.defvjp(_forward, _backward)


def _check(x: DeltaInputs, entry: Array, starts: Array) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    if x.q.ndim != 5 or not jnp.issubdtype(x.q.dtype, jnp.floating):
        raise ValueError(f"q must be floating [R, n, C, K, k], {found(x.q)}")
    R, n, C, K, k = x.q.shape
    H, v = x.v.shape[-2:]
    if H % K:
        raise ValueError(f"v must have a multiple of {K} heads, {found(x.v)}")
    shapes = {"k": x.q.shape, "v": (R, n, C, H, v), "g": (R, n, C, H), "beta": (R, n, C, H)}
    for name, shape in shapes.items():
        array = getattr(x, name)
        dtype = x.q.dtype if name in ("k", "v") else starts.dtype
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}{list(shape)}, {found(array)}")
    if entry.shape != (R, n) or not jnp.issubdtype(entry.dtype, jnp.integer):
        raise ValueError(f"entry must be int32[{R}, {n}], {found(entry)}")
    if starts.shape[:1] + starts.shape[2:] != (R, H, k, v) or not jnp.issubdtype(starts.dtype, jnp.floating):
        raise ValueError(f"starts must be floating [{R}, s, {H}, {k}, {v}], {found(starts)}")
