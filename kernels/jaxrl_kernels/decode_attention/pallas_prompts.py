"""`decode_attention` as one Pallas kernel for TPU (Mosaic); in interpret mode it runs anywhere.

The grid is (blocks of prompt slots, blocks of heads, tiles of columns), tiles innermost. A tile is processed for all
queries of a slot at once, so keys and values are read from memory once, however many rows continue a prompt. Logits and
their exponentials stay in VMEM. The running sums of a block are output blocks that stay in VMEM over its tiles (Milakov
and Gimelshein 2018, https://arxiv.org/abs/1805.02867, for the running maximum).

If a slot has several tiles, those after the end of the prompt are neither computed nor fetched: their index is that of
the last tile in use, which is already in VMEM. If all columns are one tile, a block has several slots, because each
step of the grid has overhead.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.decode_attention.reference import MASKED, Numbers, PartialAttention
from jaxrl_kernels.decode_attention.tiles import Tiles, add_tile, block_sizes, by_lanes

Array = jax.Array


def _kernel(length: Any, q: Any, keys: Any, values: Any, *rest: Any, of: Tiles) -> None:
    """One tile for one block of slots and heads.

    length: int32[P] in SMEM; q: [i, j, Q, h]; keys, values: of i slots and j heads, with columns along the
    axes of `Tiles`; rest: positions int32[i, Q, 1] if there is a window, scales f32[i, j, 1, T], results.
    """
    acc, m, l = rest[-3:]
    position, window = rest[0] if of.numbers.window else None, of.numbers.window
    key_scale, value_scale = rest[-5:-3] if of.scaled else (None, None)
    block, number, tile = pl.program_id(0), pl.program_id(2), keys.shape[2 + of.key_axis]
    first = number * tile

    @pl.when(number == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)
        m[...] = jnp.full_like(m, MASKED)
        l[...] = jnp.zeros_like(l)

    def look(slot: int) -> None:
        tokens = length[block * keys.shape[0] + slot]
        column = first + jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)
        at = jnp.maximum(tokens - of.columns, 0) + column
        seen = (at < tokens) & (column < of.columns)
        if position is not None:
            seen = seen & (position[slot] - at < window)
        for head in range(keys.shape[1]):
            here = slot, head
            scales: tuple[Any, Any] = (key_scale[here], value_scale[here]) if of.scaled else (None, None)
            add_tile((acc, m, l), here, q[here], keys[here], values[here], seen, *scales, first, of)

    if keys.shape[0] == 1:
        pl.when(first < length[block])(lambda: look(0))
    else:
        for slot in range(keys.shape[0]):
            look(slot)


def pallas_prompts(
    q: Array, keys: Array, values: Array, length: Array, position: Array, key_scale: Array | None,
    value_scale: Array | None, *, numbers: Numbers, tile: int | None = None, interpret: bool = False,
) -> PartialAttention:  # fmt: skip
    """The result of `reference_prompts`, by the kernel. Without visible columns, acc and l are 0."""
    P, K, W, R, h = q.shape
    S, Q = keys.shape[3], W * R
    i, j, tile = block_sizes(P, K, Q, h, S, keys.dtype.itemsize, tile)

    def used(p: Any, t: Any, length: Any) -> Any:
        """The tile's index, at most that of the last tile in use, which is then not fetched again."""
        return t if i > 1 else jnp.minimum(t, jax.lax.div(jnp.maximum(length[p] - 1, 0), jnp.int32(tile)))

    def of_block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((i, j, *shape), lambda p, k, t, length: (p, k, 0, 0))

    def along(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((i, j, rows, tile), lambda p, k, t, length: (p, k, 0, used(p, t, length)))

    down = pl.BlockSpec((i, j, tile, h), lambda p, k, t, length: (p, k, used(p, t, length), 0))
    # Transposed to match the layout of XLA for TPUs, which would otherwise copy them to the layout that kernels need.
    key_axis, value_axis = int(by_lanes(S, h, True)), int(by_lanes(S, h, False))
    cache = keys if key_axis else keys.swapaxes(2, 3), values.swapaxes(2, 3) if value_axis else values
    operands = [q.reshape(P, K, Q, h), *cache]
    specs = [of_block(Q, h), *(along(h) if axis else down for axis in (key_axis, value_axis))]
    if numbers.window:
        operands.append(jnp.repeat(position, R, axis=1)[..., None])
        specs.append(pl.BlockSpec((i, Q, 1), lambda p, k, t, length: (p, 0, 0)))
    scales = [x[:, :, None] for x in (key_scale, value_scale) if x is not None]  # [P, K, 1, S]
    operands += scales
    specs += [along(1)] * len(scales)

    axes = jax.typeof(q).manual_axis_type  # inside `jax.shard_map`, results vary over the axes of the inputs
    shapes = (P, K, Q, h), (P, K, Q, 1), (P, K, Q, 1)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=axes) for shape in shapes]
    arrays: list[Any] = [length, *operands, *results]
    sums = pl.pallas_call(
        partial(_kernel, of=Tiles(S, key_axis, value_axis, bool(scales), numbers)),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(P // i, K // j, pl.cdiv(S, tile)),
            in_specs=specs,
            out_specs=[of_block(Q, h), of_block(Q, 1), of_block(Q, 1)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * P * K * Q * S * h,
            transcendentals=(2 if numbers.softcap else 1) * P * K * Q * S,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
        ),
        interpret=interpret,
        name="decode_attention",
    )(length, *operands)  # fmt: skip
    return PartialAttention(sums[0].reshape(q.shape), *(x.reshape(P, K, W, R) for x in sums[1:]))
