"""What the Triton kernels of `packed_attention` share: layout, sizes of blocks, logits and masks.

Pallas has two compilers for NVIDIA GPUs. These kernels go through Triton, which serves Ampere and Hopper alike; Mosaic
GPU needs Hopper, and JAX deprecates it under `pallas_call`. Triton wants sizes that are powers of two, so heads of
another size are read with a mask.

Arrays have their natural layout, [N, L, H, h]. A program takes one block of queries of a head, or one block of keys of
a key-value head, and loops over the blocks of 128 that `Visits` lists for it, some tokens at a time (`Tile`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl_kernels.packed_attention.blocks import LANES
from jaxrl_kernels.packed_attention.reference import Sizes

Array = jax.Array

LOG2E = math.log2(math.e)  # GPUs compute powers of two: logits and their sums are in that unit within the kernels
WINDOW = pl.BlockSpec((1,), lambda i, head, n: (0,))


class Tile(NamedTuple):
    """What a program holds at a time, and how Triton compiles it."""

    queries: int  # powers of two, 128 at most
    keys: int
    warps: int
    stages: int


# Tiles of the kernels for the forward pass, dq, and dk with dv, by whether numbers have 16 bits and by head size. They
# compile to at most 99 KiB of shared memory on GPUs that have no more (compute capability 8.9) and spill few registers,
# by what Triton and ptxas report. Nothing was timed.
TILES = {
    (True, 64): ((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
    (True, 128): ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
    (True, 256): ((64, 32, 8, 2), (64, 16, 8, 2), (32, 32, 8, 2)),
    (False, 64): ((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    (False, 128): ((32, 32, 8, 2), (32, 32, 8, 2), (32, 16, 4, 2)),
    (False, 256): ((16, 16, 8, 2), (16, 16, 8, 2), (16, 16, 8, 2)),
}


def serves(q: Array) -> bool:
    """Whether the kernels compile for queries [N, L, H, h] of this type: others do not fit in shared memory."""
    return q.dtype.itemsize <= 4 and q.shape[-1] <= max(units for _, units in TILES)


def tile_of(of: Sizes, kernel: str) -> Tile:
    """The tile of a kernel: "forward", "dq" or "dkv"."""
    units = min(max(of.units, 64), 256)  # beyond, they are only interpreted
    return Tile(*TILES[of.dtype.itemsize <= 2, units][("forward", "dq", "dkv").index(kernel)])


def read(x: Any, at: tuple[Any, ...], of: Sizes) -> Array:
    """Tokens of a head, [tokens, units]; what is beyond the head size is 0."""
    return x[at] if of.units == of.h else plgpu.load(x.at[at], mask=(jnp.arange(of.units) < of.h)[None, :], other=0.0)


def write(x: Any, value: Array, of: Sizes) -> None:
    """Store the tokens of a head, [tokens, units], without what is beyond the head size."""
    if of.units == of.h:
        x[...] = value.astype(x.dtype)
    else:
        plgpu.store(x, value.astype(x.dtype), mask=(jnp.arange(of.units) < of.h)[None, :])


def block_of(size: int) -> Any:
    """The block of 128 tokens that has the `size` tokens of this program."""
    return jax.lax.div(pl.program_id(0), np.int32(LANES // size))


def visit(listed: Any, counts: Any, block: Any, size: int, compute: Callable[..., Any], initial: Any) -> Any:
    """Fold `compute(tokens, carry)` over the blocks that are listed for a block, `size` tokens at a time.

    listed: int32[blocks, others]; counts: int32[blocks]; tokens: a slice of `size` of the other side.
    """
    parts = np.int32(LANES // size)
    steps = counts[block] * parts

    def start_of(i: Any) -> Any:
        return listed[block, jax.lax.div(i, parts)] * LANES + jax.lax.rem(i, parts) * size

    def step(i: Any, state: Any) -> Any:
        start, carry = state
        # Triton reads ahead what a loop carries the address of, but not what it must look up first.
        return start_of(jnp.minimum(i + 1, steps - 1)), compute(pl.ds(pl.multiple_of(start, size), size), carry)

    return jax.lax.fori_loop(np.int32(0), steps, step, (start_of(np.int32(0)), initial))[1]


def product(a: Array, b: Array, of: Sizes, transposed: bool = False) -> Array:
    """a @ b, or a @ b.T, that accumulates in float32.

    Of float32 it is three products of TF32, whose error is that of float32: tensor cores have no float32, and Triton's
    code without them spills most of its registers.
    """
    precision: Any = None
    if of.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST if of.interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=of.accumulation)


def logits(q: Array, k: Array, of: Sizes) -> tuple[Array, Array | None]:
    """Logits times log2(e) of q [a, units] and k [b, units], [a, b], and the logits' derivative under a soft cap."""
    z, numbers = product(q, k, of, transposed=True), of.numbers
    if not numbers.softcap:
        return z * (numbers.query_scale * LOG2E), None
    tanh = jnp.tanh(z * (numbers.query_scale / numbers.softcap))
    return tanh * (numbers.softcap * LOG2E), 1 - tanh * tanh


def sees(queries: tuple[Array, Array], keys: tuple[Array, Array, Array], window: Any) -> Array:
    """Who attends to whom, of (enter, position) of queries and (enter, leave, position) of keys that broadcast."""
    (number, place), (enter, leave, position) = queries, keys
    return (enter <= number) & (number < leave) & ((place - position < window) | (window == 0))


class Specs(NamedTuple):
    """Block specs of a kernel with grid (blocks, heads, N)."""

    queries: pl.BlockSpec
    keys: pl.BlockSpec
    rows: pl.BlockSpec  # log-sum-exps [N, H, L]
    of_queries: pl.BlockSpec  # numbers of queries
    of_keys: pl.BlockSpec
    scalars: Callable[[Array], pl.BlockSpec]  # whole arrays, of a sequence


def specs_of(of: Sizes, tile: Tile, by_key: bool) -> Specs:
    """by_key: whether a program takes a block of keys and all queries of its heads, or a block of queries."""

    def scalars(x: Array) -> pl.BlockSpec:
        zeros = (0,) * (x.ndim - 1)
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, head, n: (n, *zeros))

    if by_key:
        return Specs(
            pl.BlockSpec((None, of.L, of.R, of.units), lambda i, head, n: (n, 0, head, 0)),
            pl.BlockSpec((None, tile.keys, None, of.units), lambda i, head, n: (n, i, head, 0)),
            pl.BlockSpec((None, of.R, of.L), lambda i, head, n: (n, head, 0)),
            pl.BlockSpec((None, of.L), lambda i, head, n: (n, 0)),
            pl.BlockSpec((None, tile.keys), lambda i, head, n: (n, i)),
            scalars,
        )
    return Specs(
        pl.BlockSpec((None, tile.queries, None, of.units), lambda i, head, n: (n, i, head, 0)),
        pl.BlockSpec((None, of.S, None, of.units), lambda i, head, n: (n, 0, jax.lax.div(head, np.int32(of.R)), 0)),
        pl.BlockSpec((None, None, tile.queries), lambda i, head, n: (n, head, i)),
        pl.BlockSpec((None, tile.queries), lambda i, head, n: (n, i)),
        pl.BlockSpec((None, of.S), lambda i, head, n: (n, 0)),
        scalars,
    )


def call(
    kernel: Any, name: str, of: Sizes, tile: Tile, grid: tuple[int, int, int], inputs: list[Any], in_specs: list[Any],
    results: list[Any], out_specs: list[Any], products: int,
) -> Any:  # fmt: skip
    """Run a kernel. results: shapes and dtypes. products: matrix products for each logit."""
    axes, logits = jax.typeof(inputs[0]).manual_axis_type, of.attended * of.N * of.K * of.R
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in results],
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * logits * of.h,
            transcendentals=logits,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in (*inputs, *results)),
        ),
        interpret=of.interpret,
        name=name,
    )(*inputs)
