"""`own_attention` as one Pallas kernel for TPU (Mosaic) that updates the ring KV cache in place.

In interpret mode it runs anywhere. The grid is (blocks of rows, blocks of heads, tiles of columns), tiles innermost.
The running sums start with the prompt's and the newest token's, whose key and value are operands; the tiles add the
other columns. The column of the newest token is written back in the smallest piece that the memory layout allows: the
piece is taken from the tile in VMEM, with the column replaced. The output cache aliases the input cache, and both are
kept in HBM, so nothing else is written. No step of the grid reads what another one writes.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.decode_attention.reference import Numbers, OwnAttention, PartialAttention, write_scales
from jaxrl_kernels.decode_attention.tiles import LANES, SUBLANES, Tiles, add_tile, block_sizes, by_lanes, capped

Array = jax.Array


def piece_of(columns: int, axis: int, itemsize: int) -> int:
    """Number of columns written back, for a cache with columns along sublanes (axis 0) or lanes (axis 1)."""
    sublanes = 4 * SUBLANES // itemsize  # sublanes of a tile of this dtype
    return sublanes if axis == 0 and columns % sublanes == 0 else min(columns, LANES)


def _put(cache: Any, out: Any, new: Array, axis: int, place: Any, first: Any, columns: int) -> None:
    """Write the piece of a tile that contains column `place`, with the vector `new` f32[1, h] in that column.

    cache: reference to the tile, [h, T] or [T, h] with the columns first, first + 1, ... along axis; out: reference to
    the piece.
    """
    size, tile = out.shape[axis], cache.shape[axis]
    within = jax.lax.rem(place, jnp.int32(size))  # cheaper than %, which handles signs
    start = place - within - first
    if axis == 1:  # an exact transpose from row to column
        square = (new.shape[1], new.shape[1])
        diagonal = jax.lax.broadcasted_iota(jnp.int32, square, 0) == jax.lax.broadcasted_iota(jnp.int32, square, 1)
        new = jnp.sum(jnp.where(diagonal, new, 0.0), axis=1, keepdims=True)

    def write(piece: Any, width: int) -> None:
        cut = (piece, slice(None)) if axis == 0 else (slice(None), piece)
        old = cache[cut].astype(jnp.float32)
        x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == within, new, old)
        x = x.astype(jnp.int32) if jnp.issubdtype(out.dtype, jnp.integer) else x
        out[(slice(width), slice(None)) if axis == 0 else (slice(None), slice(width))] = x.astype(out.dtype)

    if size == tile:
        write(slice(None), size)
    elif columns % size == 0:
        write(pl.ds(pl.multiple_of(start, size), size), size)
    else:  # the last piece can be partial
        for at in range(0, tile, size):
            width = min(size, tile - at)
            pl.when(start == at)(partial(write, slice(at, at + width), width))


def _kernel(count: Any, place: Any, *refs: Any, of: Tiles) -> None:
    """One tile for one block of i rows and j heads.

    In SMEM: count int32[B], place int32[1] and, if there are scales, the new scales f32[B * K] each. refs: q
    [i, j, R, h], new keys and values [i, j, 1, h], acc f32[i, j, R, h] and (m, l) f32[i, j, R, 2] of the prompt, keys
    and values with columns along the axes of `Tiles`, scales f32[i, j, 1, T]; outputs: results
    [i, j, R, h] and pieces of keys and values; scratch: the running sums.
    """
    scaled, columns, window = of.scaled, of.columns, of.numbers.window
    absent: tuple[Any, ...] = () if scaled else (None, None)
    new_key_scale, new_value_scale, q, k, v, prompt_acc, prompt_m_l, keys, values, *rest = (*absent, *refs)
    key_scale, value_scale, y, keys_out, values_out, acc, m, l = (*absent, *rest)
    rows, heads = keys.shape[:2]
    number, last, tile = pl.program_id(2), pl.num_programs(2) - 1, keys.shape[2 + of.key_axis]
    first_row, first_head, all_heads = pl.program_id(0) * rows, pl.program_id(1) * heads, pl.num_programs(1) * heads
    first, column = number * tile, place[0]
    each = [(row, head) for row in range(rows) for head in range(heads)]

    @pl.when(number == 0)
    def _() -> None:
        for here in each:
            at = (first_row + here[0]) * all_heads + first_head + here[1]
            products = q[here].astype(jnp.float32) * k[here].astype(jnp.float32)
            logits = jnp.sum(products, axis=1, keepdims=True)
            logits = capped(logits * new_key_scale[at] if scaled else logits, of.numbers)
            before = prompt_m_l[here][:, :1]
            now = jnp.maximum(before, logits)
            rescale, weights = jnp.exp(before - now), jnp.exp(logits - now)
            m[here] = now
            l[here] = rescale * prompt_m_l[here][:, 1:] + weights
            value = v[here].astype(jnp.float32)
            acc[here] = rescale * prompt_acc[here] + weights * (value * new_value_scale[at] if scaled else value)

    for here in each:
        at = first + jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)
        age = column - at
        age = jnp.where(age < 0, age + columns, age)
        seen = (age > 0) & (age <= count[first_row + here[0]]) & (at < columns)  # the newest is already in the sums
        seen = seen & (age < window) if window else seen
        scales: tuple[Any, Any] = (key_scale[here], value_scale[here]) if scaled else (None, None)
        add_tile((acc, m, l), here, q[here], keys[here], values[here], seen, *scales, first, of)

    @pl.when((first <= column) & (column < first + tile))
    def _() -> None:
        for here in each:
            for cache, out, new, axis in ((keys, keys_out, k, of.key_axis), (values, values_out, v, of.value_axis)):
                _put(cache.at[here], out.at[here], new[here].astype(jnp.float32), axis, column, first, columns)

    @pl.when(number == last)
    def _() -> None:
        y[...] = (acc[...] / jnp.maximum(l[...], 1e-30)).astype(y.dtype)


def pallas_own(
    q: Array, k: Array, v: Array, keys: Array, values: Array, count: Array, step: Array, prompt: PartialAttention,
    new_scales: tuple[Array, Array] | None, scales: tuple[Array, Array] | None, *, numbers: Numbers,
    tile: int | None = None, interpret: bool = False,
) -> OwnAttention:  # fmt: skip
    """The result of `reference_own`, by the kernel."""
    B, K, R, h = q.shape
    S, itemsize = keys.shape[3], keys.dtype.itemsize
    i, j, tile = block_sizes(B, K, R, h, S, itemsize, tile)
    place = (step % S)[None]

    def of_block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((i, j, *shape), lambda b, k, t, *scalars: (b, k, 0, 0))

    def along(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((i, j, rows, tile), lambda b, k, t, *scalars: (b, k, 0, t))

    down = pl.BlockSpec((i, j, tile, h), lambda b, k, t, *scalars: (b, k, t, 0))

    def piece(axis: int) -> pl.BlockSpec:
        size = piece_of(S, axis, itemsize)

        def at(place: Any) -> Any:
            return jax.lax.div(place[0], jnp.int32(size))

        if axis:
            return pl.BlockSpec((i, j, h, size), lambda b, k, t, count, place, *_: (b, k, 0, at(place)))
        return pl.BlockSpec((i, j, size, h), lambda b, k, t, count, place, *_: (b, k, at(place), 0))

    # Transposed to match the layout of XLA for TPUs: see `pallas_prompts`.
    key_axis, value_axis = int(by_lanes(S, h, True)), int(by_lanes(S, h, False))

    def transposed(x: Array, natural: Any) -> Array:
        return x if natural else x.swapaxes(2, 3)

    cache = transposed(keys, key_axis), transposed(values, not value_axis)
    scalars: list[Any] = [count, place]
    if scales is not None and new_scales is not None:
        scalars += [x.reshape(-1) for x in new_scales]
        scales = write_scales(scales, new_scales, place[0])  # outside of the kernel: they are small
    sums = jnp.stack([prompt.m, prompt.l], axis=-1)
    operands = [q, k[:, :, None], v[:, :, None], prompt.acc, sums, *cache, *(x[:, :, None] for x in scales or ())]
    specs = [of_block(R, h), of_block(1, h), of_block(1, h), of_block(R, h), of_block(R, 2)]
    specs += [along(h) if axis else down for axis in (key_axis, value_axis)] + [along(1)] * len(scales or ())

    axes = jax.typeof(q).manual_axis_type  # inside `jax.shard_map`, results vary over the axes of the inputs
    results: list[Any] = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in (q, *cache)]
    if not interpret:
        # Otherwise XLA may take a cache of eight bits into VMEM before the kernel, and write it back after it.
        results[1:] = [pltpu.HBM.from_type(jax.typeof(x)) for x in cache]
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*scalars, *operands, results[0]))
    moved += B * K * h * itemsize * sum(piece_of(S, axis, itemsize) for axis in (key_axis, value_axis))
    at = len(scalars) + 5  # index of `keys` among the operands
    y, *cache_out = pl.pallas_call(
        partial(_kernel, of=Tiles(S, key_axis, value_axis, scales is not None, numbers)),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B // i, K // j, pl.cdiv(S, tile)),
            in_specs=specs,
            out_specs=[of_block(R, h), piece(key_axis), piece(value_axis)],
            scratch_shapes=[pltpu.VMEM((i, j, R, width), jnp.float32) for width in (h, 1, 1)],
        ),
        input_output_aliases={at: 1, at + 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * R * S * h,
            transcendentals=(2 if numbers.softcap else 1) * B * K * R * S,
            bytes_accessed=moved,
        ),
        interpret=interpret,
        name="own_attention",
    )(*scalars, *operands)  # fmt: skip
    return OwnAttention(y, transposed(cache_out[0], key_axis), transposed(cache_out[1], not value_axis), scales)
