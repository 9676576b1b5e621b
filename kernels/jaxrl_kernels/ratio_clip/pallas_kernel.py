"""`ratio_clip` as one Pallas kernel for TPU (Mosaic); in interpret mode it runs anywhere.

The grid iterates over blocks of whole rows, because a ratio of the row needs the row's sum before its first slope.
Undefined rows of a partial last block are never written back, and rows are independent. The compiler may fuse the
computation of the inputs (masks, broadcast scales) into the kernel, so that they need not be materialised.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.ratio_clip.rows import Bounds, Clipped, Rows, of_rows

Array = jax.Array

ROW_STEP = 8  # sublanes: the tile of float32
MAX_ROWS = 256
BLOCK_BYTES = 512 * 2**10  # of a block of one array; VMEM has up to six of them, double-buffered, and temporaries
LONGEST = BLOCK_BYTES // (4 * ROW_STEP)  # longest row of which ROW_STEP fit in a block


def default_rows(rows: int, length: int) -> int:
    """Rows per block: as many as fit, a multiple of ROW_STEP or all of them."""
    most = min(MAX_ROWS, max(ROW_STEP, BLOCK_BYTES // (4 * max(length, 1)) // ROW_STEP * ROW_STEP))
    return min(rows, most)


def _kernel(limits: Any, *refs: Any, has_dual: bool, **settings: Any) -> None:
    """One block of rows. limits: f32[3] in SMEM, the bounds; 0 in place of an unused dual clip."""
    *arrays, slope, statistics = refs
    rows = Rows(*(x[...] for x in arrays))
    bounds = Bounds(limits[0], limits[1], limits[2] if has_dual else None)
    slope[...], found = of_rows(rows, bounds, **settings)
    column = jax.lax.broadcasted_iota(jnp.int32, statistics.shape, 1)
    table = jnp.zeros(statistics.shape, jnp.float32)
    for place, statistic in enumerate(found):
        table = jnp.where(column == place, statistic, table)
    statistics[...] = table


def pallas_rows(
    rows: Rows, bounds: Bounds, *, whole_row: bool, mean: bool, row_block: int | None, interpret: bool
) -> tuple[Array, Clipped]:
    """The result of `rows.of_rows`, by the kernel."""
    N, L = rows.logp.shape
    R = min(N, row_block or default_rows(N, L))
    limits = jnp.stack([*bounds[:2], jnp.zeros_like(bounds.low) if bounds.dual is None else bounds.dual])
    arrays = [x for x in rows if x is not None]
    axes = jax.typeof(rows.logp).manual_axis_type  # inside `jax.shard_map`, results vary as the inputs do
    widths = L, len(Clipped._fields)
    block = lambda width: pl.BlockSpec((R, width), lambda n: (n, 0))  # noqa: E731
    slope, table = pl.pallas_call(
        partial(_kernel, has_dual=bounds.dual is not None, whole_row=whole_row, mean=mean),
        grid=(pl.cdiv(N, R),),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] + [block(L)] * len(arrays),
        out_specs=[block(width) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((N, width), jnp.float32, manual_axis_type=axes) for width in widths],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), allow_input_fusion=(False, *(True for _ in arrays))
        ),
        interpret=interpret,
        name="ratio_clip",
    )(limits, *arrays)
    return slope, Clipped(*jnp.split(table, widths[1], axis=1))
