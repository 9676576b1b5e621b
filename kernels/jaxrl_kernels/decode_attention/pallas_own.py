"""`own_attention` as one Pallas kernel for TPU (Mosaic), the ring written in place; in interpret mode it runs anywhere.

The grid is (blocks of rows, blocks of heads, tiles of columns), tiles innermost. The running sums begin with those of
the prompt and the newest token, whose key and value are at hand; the tiles add the other columns. The newest token's
column of the ring goes out in a piece that is as small as a TPU's memory is cut: the piece comes out of the tile that
is there anyway, with the column put in, and the ring given back is the ring that came in (an alias), so that nothing
else of it is written. No other step of the grid reads what a step writes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.decode_attention.reference import OwnAttention, PartialAttention, write_scales
from jaxrl_kernels.decode_attention.tiles import LANES, SUBLANES, add_tile, block_sizes, by_lanes, capped

Array = jax.Array


def piece_of(columns: int, axis: int, itemsize: int) -> int:
    """How many columns are written of a ring that has them along sublanes (axis 0) or lanes (1)."""
    sublanes = 4 * SUBLANES // itemsize  # of a tile of such numbers
    return sublanes if axis == 0 and columns % sublanes == 0 else min(columns, LANES)


def _put(ring: Any, out: Any, new: Array, axis: int, place: Any, first: Any, columns: int) -> None:
    """Write the piece of a ring's tile that column `place` is in, with the vector `new` f32[1, h] there.

    ring: reference to the tile, [h, T] or [T, h] with the columns first, first + 1, ... along axis; out: to the piece.
    """
    size, tile = out.shape[axis], ring.shape[axis]
    within = jax.lax.rem(place, jnp.int32(size))  # not % and //, which ask for the signs
    start = place - within - first
    if axis == 1:  # the row as a column, to the bit
        square = (new.shape[1], new.shape[1])
        diagonal = jax.lax.broadcasted_iota(jnp.int32, square, 0) == jax.lax.broadcasted_iota(jnp.int32, square, 1)
        new = jnp.sum(jnp.where(diagonal, new, 0.0), axis=1, keepdims=True)

    def write(piece: Any, width: int) -> None:
        cut = (piece, slice(None)) if axis == 0 else (slice(None), piece)
        old = ring[cut].astype(jnp.float32)
        x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, old.shape, axis) == within, new, old)
        x = x.astype(jnp.int32) if jnp.issubdtype(out.dtype, jnp.integer) else x
        out[(slice(width), slice(None)) if axis == 0 else (slice(None), slice(width))] = x.astype(out.dtype)

    if size == tile:
        write(slice(None), size)
    elif columns % size == 0:
        write(pl.ds(pl.multiple_of(start, size), size), size)
    else:  # a last piece may be short
        for at in range(0, tile, size):
            width = min(size, tile - at)
            pl.when(start == at)(partial(write, slice(at, at + width), width))


def _kernel(
    count: Any,
    place: Any,
    *refs: Any,
    columns: int,
    window: int,
    scaled: bool,
    key_axis: int,
    value_axis: int,
    query_scale: float,
    softcap: float,
) -> None:
    """One tile for one block of i rows and j heads.

    In SMEM: count int32[B], place int32[1], and the new scales f32[B * K] each, if there are scales. refs: q
    [i, j, R, h], new keys and values [i, j, 1, h], the prompt's sums f32[i, j, R, h] and [i, j, R, 2], keys and values
    with the columns along key_axis and value_axis (0 or 1), scales f32[i, j, 1, T]; results [i, j, R, h] and pieces of
    keys and values; the running sums.
    """
    nothing: tuple[Any, ...] = () if scaled else (None, None)
    of_key, of_value, q, k, v, so_far, numbers, keys, values, *rest = (*nothing, *refs)
    key_scale, value_scale, y, keys_out, values_out, acc, m, l = (*nothing, *rest)
    rows, heads = keys.shape[:2]
    number, last, tile = pl.program_id(2), pl.num_programs(2) - 1, keys.shape[2 + key_axis]
    first_row, first_head, all_heads = pl.program_id(0) * rows, pl.program_id(1) * heads, pl.num_programs(1) * heads
    first, column = number * tile, place[0]
    each = [(row, head) for row in range(rows) for head in range(heads)]

    @pl.when(number == 0)
    def _() -> None:
        for here in each:
            at = (first_row + here[0]) * all_heads + first_head + here[1]
            products = q[here].astype(jnp.float32) * k[here].astype(jnp.float32)
            logits = jnp.sum(products, axis=1, keepdims=True)
            logits = capped(logits * of_key[at] if scaled else logits, query_scale, softcap)
            before = numbers[here][:, :1]
            now = jnp.maximum(before, logits)
            fade, weights = jnp.exp(before - now), jnp.exp(logits - now)
            m[here] = now
            l[here] = fade * numbers[here][:, 1:] + weights
            value = v[here].astype(jnp.float32)
            acc[here] = fade * so_far[here] + weights * (value * of_value[at] if scaled else value)

    for here in each:
        at = first + jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)
        age = column - at
        age = jnp.where(age < 0, age + columns, age)
        seen = (age > 0) & (age <= count[first_row + here[0]]) & (at < columns)  # the newest one is in the sums
        seen = seen & (age < window) if window else seen
        scales = (key_scale[here], value_scale[here]) if scaled else (None, None)
        add_tile(
            (acc, m, l), here, q[here], keys[here], values[here], seen, *scales, key_axis=key_axis,
            value_axis=value_axis, query_scale=query_scale, softcap=softcap, first=first, columns=columns,
        )  # fmt: skip

    @pl.when((first <= column) & (column < first + tile))
    def _() -> None:
        for here in each:
            for ring, out, new, axis in ((keys, keys_out, k, key_axis), (values, values_out, v, value_axis)):
                _put(ring.at[here], out.at[here], new[here].astype(jnp.float32), axis, column, first, columns)

    @pl.when(number == last)
    def _() -> None:
        y[...] = (acc[...] / jnp.maximum(l[...], 1e-30)).astype(y.dtype)


def pallas_own(
    q: Array,
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    count: Array,
    step: Array,
    prompt: PartialAttention,
    new_scales: tuple[Array, Array] | None,
    scales: tuple[Array, Array] | None,
    *,
    query_scale: float,
    softcap: float,
    window: int,
    tile: int | None = None,
    interpret: bool = False,
) -> OwnAttention:
    """As `reference_own`, by the kernel."""
    B, K, R, h = q.shape
    S, itemsize = keys.shape[3], keys.dtype.itemsize
    i, j, tile = block_sizes(B, K, R, h, S, itemsize, tile)
    place = (step % S)[None]

    of_block = lambda *shape: pl.BlockSpec((i, j, *shape), lambda b, k, t, *numbers: (b, k, 0, 0))  # noqa: E731
    along = lambda rows: pl.BlockSpec((i, j, rows, tile), lambda b, k, t, *numbers: (b, k, 0, t))  # noqa: E731
    down = pl.BlockSpec((i, j, tile, h), lambda b, k, t, *numbers: (b, k, t, 0))

    def piece(axis: int) -> pl.BlockSpec:
        size = piece_of(S, axis, itemsize)
        at = lambda place: jax.lax.div(place[0], jnp.int32(size))  # noqa: E731
        if axis:
            return pl.BlockSpec((i, j, h, size), lambda b, k, t, count, place, *_: (b, k, 0, at(place)))
        return pl.BlockSpec((i, j, size, h), lambda b, k, t, count, place, *_: (b, k, at(place), 0))

    # Turned round as a TPU keeps them: see `pallas_prompts`.
    key_axis, value_axis = int(by_lanes(S, h, True)), int(by_lanes(S, h, False))
    turn = lambda x, natural: x if natural else x.swapaxes(2, 3)  # noqa: E731
    ring = turn(keys, key_axis), turn(values, not value_axis)
    numbers: list[Any] = [count, place]
    if scales is not None and new_scales is not None:
        numbers += [x.reshape(-1) for x in new_scales]
        scales = write_scales(scales, new_scales, place[0])  # small, and of a layout of their own
    sums = jnp.stack([prompt.m, prompt.l], axis=-1)
    operands = [q, k[:, :, None], v[:, :, None], prompt.acc, sums, *ring, *(x[:, :, None] for x in scales or ())]
    specs = [of_block(R, h), of_block(1, h), of_block(1, h), of_block(R, h), of_block(R, 2)]
    specs += [along(h) if axis else down for axis in (key_axis, value_axis)] + [along(1)] * len(scales or ())

    axes = jax.typeof(q).manual_axis_type  # inside `jax.shard_map`, results vary as the inputs do
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in (q, *ring)]
    moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*numbers, *operands, results[0]))  # each once
    moved += B * K * h * itemsize * sum(piece_of(S, axis, itemsize) for axis in (key_axis, value_axis))
    at = len(numbers) + 5  # the ring's keys among the operands
    y, *ring_out = pl.pallas_call(
        partial(
            _kernel, columns=S, window=window, scaled=scales is not None, key_axis=key_axis, value_axis=value_axis,
            query_scale=query_scale, softcap=softcap,
        ),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(B // i, K // j, pl.cdiv(S, tile)),
            in_specs=specs,
            out_specs=[of_block(R, h), piece(key_axis), piece(value_axis)],
            scratch_shapes=[pltpu.VMEM((i, j, R, width), jnp.float32) for width in (h, 1, 1)],
        ),
        input_output_aliases={at: 1, at + 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * R * S * h,
            transcendentals=(2 if softcap else 1) * B * K * R * S,
            bytes_accessed=moved,
        ),
        interpret=interpret,
        name="own_attention",
    )(*numbers, *operands)  # fmt: skip
    return OwnAttention(y, turn(ring_out[0], key_axis), turn(ring_out[1], not value_axis), scales)
