"""Forward and backward pass of `fused_logprob` over a slice of the vocabulary as Pallas kernels for TPU (Mosaic).

In interpret mode they run anywhere. The grids are (row blocks, vocabulary tiles), tiles innermost, so that a block of
hidden states stays in VMEM over all tiles of the unembedding.

Forward: the running sums of a row block are output blocks that stay in VMEM over the tiles. Each of LANES lanes sums
over every LANES-th token, so that no tile needs a reduction across lanes; the lanes are reduced outside. Logits stay in
VMEM.

Backward: for each block of the vocabulary, a kernel recomputes the logits and writes their derivative, rounded to the
dtype of the products, which XLA computes: see `blocked.gradients`. The kernel reads its tiles from the whole
unembedding.

A partial last tile reads undefined rows of the unembedding: the forward pass excludes their columns, and the backward
pass never writes them back. Undefined rows of the last row block are never written back either.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.half_products import products
from jaxrl_kernels.logprob.blocked import gradients
from jaxrl_kernels.logprob.tile import (
    EXCLUDED,
    Cotangents,
    HeadOptions,
    Inputs,
    LogitSums,
    SliceResult,
    Support,
    capped_logits,
    counted,
    d_logits,
    merge,
)

Array = jax.Array

LANES = 128
ROW_STEP = 32
MAX_ROWS, ROW_BYTES = 1024, 8 * 2**20  # of a block of hidden states, which is double-buffered
MAX_TILE, TILE_BYTES = 512, 4 * 2**20  # of a tile of the unembedding, which is double-buffered
MAX_BLOCK, BLOCK_BYTES = 8192, 256 * 2**20  # of the derivative of a block's logits, in HBM
MIB = 2**20


class Plan(NamedTuple):
    """Static sizes and options of the kernels."""

    rows: int  # rows per block
    tile: int  # tokens per tile
    block: int  # tokens whose derivatives of logits are in HBM at a time, a multiple of tile
    softcap: float
    transposed: bool  # whether the kernels read the unembedding as [D, V]
    interpret: bool


def plan(inputs: Inputs, options: HeadOptions, interpret: bool) -> Plan:
    """A plan that fits VMEM (about 40 MiB at most, for D up to 4,096) with evenly filled blocks.

    Each row block reads the whole unembedding, so a row block is as large as fits, to do more operations per byte.
    """
    (rows, width), vocabulary = inputs.hidden.shape, inputs.unembedding.shape[0]
    itemsize = max(inputs.hidden.dtype.itemsize, inputs.unembedding.dtype.itemsize)

    def evenly(size: int, most: int, step: int) -> int:
        parts = pl.cdiv(size, max(step, most // step * step))
        return pl.cdiv(pl.cdiv(size, parts), step) * step

    row_block = options.row_block or evenly(rows, min(MAX_ROWS, ROW_BYTES // (width * itemsize)), ROW_STEP)
    most = options.block_size or min(MAX_BLOCK, BLOCK_BYTES // (rows * itemsize))
    tile = max(LANES, min(MAX_TILE, TILE_BYTES // (width * itemsize)) // LANES * LANES)
    tile = min(tile, pl.cdiv(min(vocabulary, most), LANES) * LANES)
    # XLA for TPUs stores the unembedding transposed if its rows are not a multiple of the lanes, and would copy it
    # before every kernel that reads rows.
    transposed = width % LANES != 0
    return Plan(min(rows, row_block), tile, evenly(vocabulary, most, tile), options.softcap, transposed, interpret)


class _Table(NamedTuple):
    """Per-row numbers as columns of one f32[M, K], since HBM pads each array [M, 1] to 128 columns anyway."""

    temperature: Array
    support: Support | None
    parts: Any = None  # `SliceResult` and `Cotangents` in the backward pass
    cotangents: Any = None


def _tile(
    of: Plan, first: Any, limit: Any, hidden: Any, tile: Any, targets: Any, packed: Any, structure: Any
) -> tuple[Inputs, Array, Array, _Table]:
    """A tile's inputs, its logits f32[R, T] before the cap, its tokens int32[1, T] from `first` on; the table.

    hidden, tile, targets, packed: references to blocks in VMEM; structure: of the table, whose columns are f32[R, 1].
    """
    columns = packed[...]
    table = jax.tree.unflatten(structure, [columns[:, i : i + 1] for i in range(columns.shape[1])])
    rows = Inputs(hidden[...], tile[...], targets[...], table.temperature, table.support, limit)
    unembedding = rows.unembedding.T if of.transposed else rows.unembedding
    token = first + jax.lax.broadcasted_iota(jnp.int32, (1, of.tile), 1)
    return rows, products(rows.hidden, unembedding), token, table


def _sums_kernel(
    place: Any, hidden: Any, tile: Any, targets: Any, packed: Any, *outputs: Any, of: Plan, structure: Any
) -> None:
    """One tile for one row block. place: int32[2] in SMEM; its second entry is the vocabulary without padding."""
    number = pl.program_id(1)
    rows, logits, token, _ = _tile(of, number * of.tile, place[1], hidden, tile, targets, packed, structure)
    z = capped_logits(logits, of.softcap) / rows.temperature
    count = counted(z, token, rows)
    assert count is not None  # there is a limit
    z = jnp.where(count, z, EXCLUDED)
    groups = [slice(start, start + LANES) for start in range(0, of.tile, LANES)]
    m = reduce(jnp.maximum, [z[:, group] for group in groups])
    l = acc = jnp.zeros_like(m)
    target_logit = jnp.full_like(m, -jnp.inf)
    for group in groups:
        shifted = z[:, group] - m
        exponential = jnp.exp(shifted)
        l += exponential
        acc += exponential * shifted
        target_logit = jnp.where(token[:, group] == rows.targets, z[:, group], target_logit)
    add_tile(number, outputs, LogitSums(m, l, acc, target_logit), merge)


def add_tile(number: Any, outputs: Sequence[Any], new: Any, merge: Callable[[Any, Any], Any]) -> None:
    """Write the sums of a tile, a NamedTuple, merged with those of the tiles before it, which are in `outputs`."""

    def write(sums: Any) -> None:
        for output, value in zip(outputs, sums, strict=True):
            output[...] = value

    @pl.when(number == 0)
    def _() -> None:
        write(new)

    @pl.when(number > 0)
    def _() -> None:
        write(merge(type(new)(*(output[...] for output in outputs)), new))


def _dz_kernel(
    place: Any, hidden: Any, tile: Any, targets: Any, packed: Any, dz: Any, *, of: Plan, structure: Any
) -> None:
    """One tile for one row block. place: int32[2] in SMEM, the first tile and the size of the vocabulary."""
    first = (place[0] + pl.program_id(1)) * of.tile
    rows, logits, token, table = _tile(of, first, place[1], hidden, tile, targets, packed, structure)
    dz[...] = d_logits(logits, token, rows, table.parts, table.cotangents, of.softcap).astype(dz.dtype)


class _Result(NamedTuple):
    """An array [M, columns] that a kernel writes, by blocks [R, width]."""

    columns: int
    width: int
    dtype: Any
    of_rows: bool  # one block for all tiles of a row block, instead of one per tile


def _call(
    kernel: Any, name: str, of: Plan, inputs: Inputs, table: _Table, first: Any, tokens: int, results: list[_Result]
) -> list[Array]:
    """Run a kernel over all rows and `tokens` tokens, starting at tile `first`."""
    hidden, unembedding = inputs.hidden, inputs.unembedding
    (rows, width), vocabulary = hidden.shape, unembedding.shape[0]
    numbers, structure = jax.tree.flatten(table)
    packed = jnp.stack(numbers, axis=1)
    grid = pl.cdiv(rows, of.rows), pl.cdiv(tokens, of.tile)
    known = vocabulary if inputs.limit is None else jnp.minimum(inputs.limit, vocabulary)
    place = jnp.stack([jnp.asarray(x, jnp.int32) for x in (first, known)])

    def of_rows(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((of.rows, columns), lambda r, t, place: (r, 0))

    if of.transposed:
        tiles = pl.BlockSpec((width, of.tile), lambda r, t, place: (0, place[0] + t))
    else:
        tiles = pl.BlockSpec((of.tile, width), lambda r, t, place: (place[0] + t, 0))
    axes = jax.typeof(hidden).manual_axis_type  # inside `jax.shard_map`, results vary over the axes of the inputs
    return pl.pallas_call(
        partial(kernel, of=of, structure=structure),
        out_shape=[jax.ShapeDtypeStruct((rows, r.columns), r.dtype, manual_axis_type=axes) for r in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[of_rows(width), tiles, of_rows(1), of_rows(packed.shape[1])],
            out_specs=[of_rows(x.width) if x.of_rows else pl.BlockSpec((of.rows, x.width), lambda r, t, place: (r, t))
                       for x in results],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem(of, inputs, results)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * tokens * width + 16 * rows * tokens,
            transcendentals=(2 if of.softcap else 1) * rows * tokens,
            bytes_accessed=hidden.nbytes
            + grid[0] * tokens * width * unembedding.dtype.itemsize
            + sum(rows * r.columns * jnp.dtype(r.dtype).itemsize for r in results),
        ),
        interpret=of.interpret,
        name=name,
    )(place, hidden, unembedding.T if of.transposed else unembedding, inputs.targets[:, None], packed)  # fmt: skip


def _vmem(of: Plan, inputs: Inputs, results: list[_Result]) -> int:
    """VMEM limit in bytes: double-buffered blocks, a transposed copy, and some copies of a tile's logits."""
    hidden, unembedding = inputs.hidden, inputs.unembedding
    width = pl.cdiv(hidden.shape[1], LANES) * LANES
    blocks = of.rows * width * hidden.dtype.itemsize + of.tile * width * unembedding.dtype.itemsize
    blocks += 2 * of.rows * LANES * 4  # targets and the table
    blocks += sum(of.rows * r.width * jnp.dtype(r.dtype).itemsize for r in results)
    converted = 0 if hidden.dtype == unembedding.dtype else (of.rows + of.tile) * width * 4
    return max(16 * MIB, 3 * blocks + converted + 8 * of.rows * of.tile * 4 + 4 * MIB)


def pallas_sums(inputs: Inputs, of: Plan) -> LogitSums:
    """Sums f32[M, LANES] over the slice, in one pass."""
    table = _Table(inputs.temperature, inputs.support)
    results = [_Result(LANES, LANES, jnp.float32, of_rows=True)] * len(LogitSums._fields)
    vocabulary = inputs.unembedding.shape[0]
    return LogitSums(*_call(_sums_kernel, "fused_logprob_sums", of, inputs, table, 0, vocabulary, results))


def pallas_gradients(inputs: Inputs, parts: SliceResult, cotangents: Cotangents, of: Plan) -> tuple[Array, Array]:
    """The gradients with respect to hidden and unembedding; the logits of each block are recomputed."""
    dtype = jnp.result_type(inputs.hidden, inputs.unembedding)
    table = _Table(inputs.temperature, inputs.support, parts, cotangents)

    def dz_of_block(first: Any, width: int) -> Array:
        number = jax.lax.div(jnp.int32(first), jnp.int32(of.tile))
        results = [_Result(width, of.tile, dtype, of_rows=False)]
        return _call(_dz_kernel, "fused_logprob_dz", of, inputs, table, number, width, results)[0]

    return gradients(inputs, of.block, dz_of_block, dtype)
