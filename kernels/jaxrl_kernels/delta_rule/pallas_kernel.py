"""The gated delta rule as Pallas kernels for TPU (Mosaic).

The chunks of a row go one after the other through the kernel, some heads at a time. The states after them, from which
later chunks begin, stay on the chip: in the forward pass the states, in the backward pass their cotangents.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.delta_rule.blocked import Given
from jaxrl_kernels.delta_rule.chunk import DeltaInputs, Shares, step

Array = jax.Array
STATES = 32 * 2**20  # bytes of states that are kept on the chip
BLOCKS = 48 * 2**20  # of all else there
MOST_HEADS = 8  # whose products are interleaved


class Sizes(NamedTuple):
    """Of a call: rows, chunks, heads, tokens of a chunk, key, value, starts, and heads of a program."""

    R: int
    n: int
    H: int
    C: int
    k: int
    v: int
    s: int
    together: int


def sizes_of(given: Given, starts: Array) -> Sizes | None:
    """The sizes of a call; None where the states of one head are too many for a chip."""
    R, n, H, C, k = given[0].q.shape
    s, v = starts.shape[1], starts.shape[-1]
    of_head = (n + s) * math.prod(_tiled(k, v)) * 4
    fitting = [heads for heads in range(1, MOST_HEADS + 1) if H % heads == 0 and heads * of_head <= STATES]
    return Sizes(R, n, H, C, k, v, s, fitting[-1]) if fitting else None


def _tiled(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 8) * 8, -(-columns // 128) * 128


def step_flops(of: Sizes) -> int:
    """Operations of `chunk.step` for one head: its products, and some more for each pair of tokens and each number."""
    C, k, v = of.C, of.k, of.v
    doublings = max(C - 1, 0).bit_length()
    pairs = C * C * (2 * k + 2 * k + 2 * v + 2 * v + 28) + doublings * 4 * C**3 + doublings * 4 * C * C
    return pairs + 6 * C * k * v + 3 * k * v + 8 * C * (k + v) + 32 * C


def _read(x: DeltaInputs, shares: Shares | None) -> Given:
    """The blocks of a chunk, heads first."""
    take = lambda ref: ref[0, 0]  # noqa: E731
    return jax.tree.map(take, x), None if shares is None else jax.tree.map(take, shares)


def _forward_kernel(
    places: Any, x: Any, shares: Any, starts: Any, out: Any, after: Any, known: Any, *, of: Sizes
) -> None:
    row, chunk = pl.program_id(0), pl.program_id(2)

    @pl.when(chunk == 0)
    def _() -> None:
        known[of.n :] = starts[0]

    own, own_shares = _read(x, shares)
    found, state = step(own, known[places[row, chunk]], own_shares)
    out[0, 0], after[0, 0], known[chunk] = found, state, state


def _backward_kernel(
    places: Any, x: Any, shares: Any, starts: Any, before: Any, d_out: Any, d_after: Any, d_x: Any, d_starts: Any,
    d_known: Any, *, of: Sizes,
) -> None:  # fmt: skip
    row, chunk = pl.program_id(0), of.n - 1 - pl.program_id(2)

    @pl.when(chunk == of.n - 1)
    def _() -> None:
        d_known[...] = jnp.zeros_like(d_known)

    (own, own_shares), place = _read(x, shares), places[row, chunk]
    state = jnp.where(place < of.n, before[0, 0], starts[0, jnp.maximum(place - of.n, 0)])
    pull = jax.vjp(lambda x, state: step(x, state, own_shares), own, state)[1]
    d_own, d_state = pull((d_out[0, 0], d_known[chunk] + d_after[0, 0]))
    for ref, value in zip(d_x, d_own, strict=True):
        ref[0, 0] = value
    d_known[place] += d_state

    @pl.when(chunk == 0)
    def _() -> None:
        d_starts[0] = d_known[of.n :]


class Specs(NamedTuple):
    """Blocks of the arrays of a call, of chunks in the order in which they are computed."""

    x: DeltaInputs
    shares: Shares
    starts: Any
    states: Any  # after each chunk
    before: Any  # the state that a chunk begins with, if it is one of those


def _specs(of: Sizes, backwards: bool) -> Specs:
    def at(c: Any) -> Any:
        return of.n - 1 - c if backwards else c

    def blocks(*sizes: int, shared: bool = False) -> Any:
        heads = 1 if shared else of.together
        return pl.BlockSpec((1, 1, heads, *sizes), lambda r, h, c, places: (r, at(c), 0 if shared else h, 0, 0))

    def of_entry(r: Any, h: Any, c: Any, places: Any) -> Any:
        return r, jnp.minimum(places[r, at(c)], of.n - 1), h, 0, 0

    keys, values, numbers = blocks(of.C, of.k), blocks(of.C, of.v), blocks(1, of.C)
    marks, one = blocks(1, of.C, shared=True), blocks(1, 1, shared=True)
    starts = pl.BlockSpec((1, of.s, of.together, of.k, of.v), lambda r, h, c, places: (r, 0, h, 0, 0))
    before = pl.BlockSpec((1, 1, of.together, of.k, of.v), of_entry)
    return Specs(
        DeltaInputs(keys, keys, values, numbers, numbers), Shares(marks, marks, marks, one), starts,
        blocks(of.k, of.v), before,
    )  # fmt: skip


def _call(
    kernel: Any, name: str, of: Sizes, places: Array, inputs: Any, in_specs: Any, out_shape: Any, out_specs: Any,
    times: int, interpret: bool,
) -> Any:  # fmt: skip
    """times: how often the operations of a forward pass."""
    x, *_ = inputs
    moved = sum(x.nbytes for x in jax.tree.leaves(inputs)) + sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(out_shape)
    )
    chunks, axes = of.R * of.H * of.n, jax.typeof(places).manual_axis_type
    out_shape = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, manual_axis_type=axes), out_shape
    )
    return pl.pallas_call(
        lambda *refs: kernel(*refs, of=of),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(of.R, of.H // of.together, of.n), in_specs=in_specs, out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((of.n + of.s, of.together, of.k, of.v), x.g.dtype)],
        ),
        out_shape=out_shape,
        name=name,
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=times * chunks * step_flops(of), bytes_accessed=moved,
            transcendentals=times * chunks * (of.C * of.C + 2 * of.C + 1),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=STATES + BLOCKS
        ),
    )(places, *inputs)  # fmt: skip


def forward(given: Given, places: Array, starts: Array, of: Sizes, *, interpret: bool) -> tuple[Array, Array]:
    """Outputs [R, n, H, C, v] and the states [R, n, H, k, v] after each chunk; see `blocked.forward`."""
    x, shares = given
    specs = _specs(of, backwards=False)
    out_shape = [
        jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
        jax.ShapeDtypeStruct((of.R, of.n, of.H, of.k, of.v), x.g.dtype),
    ]
    return tuple(_call(
        _forward_kernel, "delta_rule", of, places, (x, shares, starts),
        (specs.x, None if shares is None else specs.shares, specs.starts), out_shape, [specs.x.v, specs.states], 1,
        interpret,
    ))  # fmt: skip


def backward(
    given: Given,
    places: Array,
    starts: Array,
    after: Array,
    d_out: Array,
    d_after: Array,
    of: Sizes,
    *,
    interpret: bool,
) -> tuple[DeltaInputs, Array]:
    """The cotangents of the inputs and of `starts`; see `blocked.backward`."""
    x, shares = given
    specs = _specs(of, backwards=True)
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), (x, starts))
    return tuple(_call(
        _backward_kernel, "delta_rule_backward", of, places, (x, shares, starts, after, d_out, d_after),
        (specs.x, None if shares is None else specs.shares, specs.starts, specs.before, specs.x.v, specs.states),
        shapes, (specs.x, specs.starts), 3, interpret,
    ))  # fmt: skip
