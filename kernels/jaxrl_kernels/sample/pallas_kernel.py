"""`fused_sample` as one Pallas kernel for TPU (Mosaic); in interpret mode it runs anywhere.

The grid is (row blocks, vocabulary tiles), tiles innermost. The running sums of a row block are output blocks that stay
in VMEM over its tiles. The logits and exponentials of a tile stay in VMEM. A partial last tile reads undefined rows of
the unembedding, whose columns are excluded. Undefined rows of the last row block are never written back.

If D is not a multiple of 128, XLA can choose to store the unembedding transposed and copy it before the kernel. To
avoid that, pad the unembedding and the hidden states with zeros.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.half_products import products
from jaxrl_kernels.logprob.pallas_kernel import add_tile
from jaxrl_kernels.logprob.tile import HeadOptions
from jaxrl_kernels.sample.noise import BLOCK
from jaxrl_kernels.sample.tile import DrawSums, Inputs, adjusted, block_scores, merge, of_blocks

Array = jax.Array

MAX_ROWS, ROW_STEP = 256, 32  # 32 sublanes: the tile of int8, the dtype of the mask
MAX_TILE = 1024
BUFFER_BYTES = 2 * 2**20  # of a block of hidden states or of the unembedding, each double-buffered


def of_tile(z: Array, keys: Array, temperature: Array, first: Any, interpret: bool) -> DrawSums:
    """The result of `tile.of_tile`, block by block, because Mosaic cannot cheaply reshape to [N, T / BLOCK, BLOCK]."""
    blocks = [z[:, start : start + BLOCK] for start in range(0, z.shape[1], BLOCK)]
    column = jax.lax.broadcasted_iota(jnp.int32, (z.shape[0], len(blocks)), 1)
    block_m = block_l = acc = jnp.zeros(column.shape, jnp.float32)
    for number, block in enumerate(blocks):
        m = jnp.max(block, axis=1, keepdims=True)
        shifted = block - m
        exponential = jnp.exp(shifted)
        block_m = jnp.where(column == number, m, block_m)
        block_l = jnp.where(column == number, jnp.sum(exponential, axis=1, keepdims=True), block_l)
        acc = jnp.where(column == number, jnp.sum(exponential * shifted, axis=1, keepdims=True), acc)
    score = block_scores(block_m, block_l, keys, temperature, first)
    score = jax.lax.optimization_barrier(score) if interpret else score  # XLA compiles it: see `tile.of_tile`
    highest = jnp.max(score, axis=1, keepdims=True)
    best = jnp.min(jnp.where(score == highest, column, len(blocks)), axis=1, keepdims=True)
    logits = blocks[0]
    for number, block in enumerate(blocks[1:], 1):
        logits = jnp.where(best == number, block, logits)
    return DrawSums(highest, first + best * BLOCK, logits, *of_blocks(block_m, block_l, acc))


def _kernel(
    place: Any, hidden: Any, tile: Any, keys: Any, temperature: Any, *rest: Any, softcap: float, interpret: bool
) -> None:
    """One tile for one row block. place: int32[2] in SMEM, the first token and the number of tokens that count."""
    allowed, outputs = (rest[0], rest[1:]) if len(rest) == 7 else (None, rest)
    number = pl.program_id(1)
    start = number * tile.shape[0]
    permitted = start + jax.lax.broadcasted_iota(jnp.int32, (hidden.shape[0], tile.shape[0]), 1) < place[1]
    if allowed is not None:
        permitted &= allowed[...].astype(jnp.int32) != 0
    z = adjusted(products(hidden[...], tile[...]), temperature[...], permitted, softcap)
    add_tile(number, outputs, of_tile(z, keys[...], temperature[...], place[0] + start, interpret), merge)


def pallas_sums(inputs: Inputs, options: HeadOptions, offset: Any, limit: Any, interpret: bool) -> DrawSums:
    """The result of `blocked_sums`, by the kernel. A bool mask is converted to int8 first."""
    hidden, unembedding, keys, temperature, allowed = inputs
    (rows, width), vocabulary = hidden.shape, unembedding.shape[0]
    fitting = BUFFER_BYTES // (width * max(hidden.dtype.itemsize, unembedding.dtype.itemsize))
    # As many rows as fit, because each row block reads the whole unembedding; blocks are evenly filled.
    most = min(MAX_ROWS, max(ROW_STEP, fitting // ROW_STEP * ROW_STEP))
    evenly = pl.cdiv(pl.cdiv(rows, pl.cdiv(rows, most)), ROW_STEP) * ROW_STEP
    row_block = min(rows, options.row_block or evenly)
    most = min(MAX_TILE, max(BLOCK, fitting // BLOCK * BLOCK))
    tile = min(pl.cdiv(vocabulary, BLOCK) * BLOCK, options.block_size or most)

    def of_rows(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((row_block, columns), lambda r, t: (r, 0))

    place = jnp.stack([jnp.asarray(x, jnp.int32) for x in (offset, vocabulary if limit is None else limit)])
    operands = [place, hidden, unembedding, keys, temperature[:, None]]
    tiles = pl.BlockSpec((tile, width), lambda r, t: (t, 0))
    specs = [pl.BlockSpec(memory_space=pltpu.SMEM), of_rows(width), tiles, of_rows(2), of_rows(1)]
    if allowed is not None:
        operands.append(allowed.astype(jnp.int8))
        specs.append(pl.BlockSpec((row_block, tile), lambda r, t: (r, t)))
    axes = jax.typeof(hidden).manual_axis_type  # inside `jax.shard_map`, results vary over the axes of the inputs
    columns = [BLOCK if name == "logits" else 1 for name in DrawSums._fields]
    dtypes = [jnp.int32 if name == "first" else jnp.float32 for name in DrawSums._fields]
    kinds = zip(columns, dtypes, strict=True)
    results = [jax.ShapeDtypeStruct((rows, n), dtype, manual_axis_type=axes) for n, dtype in kinds]
    found = pl.pallas_call(
        partial(_kernel, softcap=options.softcap, interpret=interpret),
        out_shape=results,
        grid=(pl.cdiv(rows, row_block), pl.cdiv(vocabulary, tile)),
        in_specs=specs,
        out_specs=[of_rows(n) for n in columns],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * vocabulary * hidden.shape[1],
            transcendentals=4 * rows * vocabulary,
            # Each block of rows reads the whole unembedding.
            bytes_accessed=pl.cdiv(rows, row_block) * unembedding.size * unembedding.dtype.itemsize,
        ),
        interpret=interpret,
        name="fused_sample",
    )(*operands)
    return DrawSums(*found)
