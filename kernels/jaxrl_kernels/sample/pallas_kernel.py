"""`fused_sample` as one Pallas kernel for TPU (Mosaic); in interpret mode it runs anywhere.

The grid is (row blocks, vocabulary tiles), tiles innermost. The six running sums of a row block are output blocks that
keep their place while the tiles pass, so they stay in VMEM until the row block is done. The logits, the noise and the
scores of a tile live in VMEM only. A last tile that is not full reads undefined rows of the unembedding: its columns
past the end are excluded. Undefined rows of a last row block are never written back.

Where D is not a multiple of 128, XLA may choose to keep the unembedding transposed and copy it before the kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.sample.noise import PERIOD
from jaxrl_kernels.sample.tile import Sums, merge, of_tile, scores

Array = jax.Array

MAX_ROWS, ROW_STEP = 256, 32  # 32 sublanes: the tile of int8, which the mask comes in
MAX_TILE = 1024
BUFFER_BYTES = 2 * 2**20  # of a block of hidden states or of the unembedding; each is held twice


def default_rows(rows: int, width: int, itemsize: int) -> int:
    """Row block: as many rows as fit the buffer, since each row block reads the whole unembedding; evenly filled."""
    most = min(MAX_ROWS, max(ROW_STEP, BUFFER_BYTES // (width * itemsize) // ROW_STEP * ROW_STEP))
    if rows <= most:
        return rows
    blocks = pl.cdiv(rows, most)
    return pl.cdiv(pl.cdiv(rows, blocks), ROW_STEP) * ROW_STEP


def default_tile(width: int, itemsize: int) -> int:
    """Vocabulary tile: a multiple of PERIOD, so that no random word is thrown away."""
    return min(MAX_TILE, max(PERIOD, BUFFER_BYTES // (width * itemsize) // PERIOD * PERIOD))


def _kernel(
    place: Any,
    hidden: Any,
    tile: Any,
    keys: Any,
    temperature: Any,
    *rest: Any,
    softcap: float,
    aligned: bool,
    interpret: bool,
) -> None:
    """One tile for one row block. place: int32[2] in SMEM, the first token and the number of tokens that count."""
    allowed, outputs = (rest[0], rest[1:]) if len(rest) == 7 else (None, rest)
    number = pl.program_id(1)
    start = number * tile.shape[0]
    permitted = start + jax.lax.broadcasted_iota(jnp.int32, (hidden.shape[0], tile.shape[0]), 1) < place[1]
    if allowed is not None:
        permitted &= allowed[...].astype(jnp.int32) != 0
    first = place[0] + start
    z, score = scores(hidden[...], tile[...], keys[...], temperature[...], permitted, first, softcap, aligned)
    new = of_tile(z, jax.lax.optimization_barrier(score) if interpret else score, first)

    def write(sums: Sums) -> None:
        for output, value in zip(outputs, sums, strict=True):
            output[...] = value

    @pl.when(number == 0)
    def _() -> None:
        write(new)

    @pl.when(number > 0)
    def _() -> None:
        write(merge(Sums(*(output[...] for output in outputs)), new))


def pallas_sums(
    hidden: Array,
    unembedding: Array,
    keys: Array,
    temperature: Array,
    allowed: Array | None,
    softcap: float,
    block_size: int | None = None,
    row_block: int | None = None,
    offset: Any = 0,
    limit: Any = None,
    aligned: bool = True,
    interpret: bool = False,
) -> Sums:
    """As `blocked_sums`, by the kernel. A mask that is bool is copied to int8 first."""
    (rows, width), vocabulary = hidden.shape, unembedding.shape[0]
    itemsize = max(hidden.dtype.itemsize, unembedding.dtype.itemsize)
    row_block = min(rows, row_block or default_rows(rows, width, itemsize))
    tile = min(vocabulary, block_size or default_tile(width, itemsize))
    by_period = aligned and (tile % PERIOD == 0 or tile == vocabulary)

    of_rows = lambda columns: pl.BlockSpec((row_block, columns), lambda r, t: (r, 0))  # noqa: E731
    place = jnp.stack([jnp.asarray(x, jnp.int32) for x in (offset, vocabulary if limit is None else limit)])
    operands = [place, hidden, unembedding, keys, temperature[:, None]]
    specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        of_rows(width),
        pl.BlockSpec((tile, width), lambda r, t: (t, 0)),
        of_rows(2),
        of_rows(1),
    ]
    if allowed is not None:
        operands.append(allowed.astype(jnp.int8))
        specs.append(pl.BlockSpec((row_block, tile), lambda r, t: (r, t)))
    dtypes = [jnp.int32 if name == "token" else jnp.float32 for name in Sums._fields]
    axes = jax.typeof(hidden).manual_axis_type  # inside `jax.shard_map`, results vary as the inputs do
    found = pl.pallas_call(
        partial(_kernel, softcap=softcap, aligned=by_period, interpret=interpret),
        out_shape=[jax.ShapeDtypeStruct((rows, 1), dtype, manual_axis_type=axes) for dtype in dtypes],
        grid=(pl.cdiv(rows, row_block), pl.cdiv(vocabulary, tile)),
        in_specs=specs,
        out_specs=[of_rows(1)] * len(dtypes),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="fused_sample",
    )(*operands)
    return Sums(*found)
