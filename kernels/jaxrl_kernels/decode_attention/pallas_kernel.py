"""`decode_attention` and `own_attention` as one Pallas kernel for TPU (Mosaic); in interpret mode it runs anywhere.

The grid is (blocks of slots, blocks of heads, tiles of columns), tiles innermost; a slot is a prompt, or a row's ring.
All queries of a slot meet a tile at once, so keys and values come from memory once however many rows continue a prompt,
and logits and their exponentials live in VMEM only. The sums of a block are output blocks that keep their place while
tiles pass (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867, for the running maximum).

Where a slot has several tiles, those behind a prompt's end are not computed, nor fetched: their index is that of the
last tile in use, which is there. Where all columns are one tile, several slots make a block, for steps of the grid cost
time too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.decode_attention.reference import MASKED, Part

Array = jax.Array

LANES, SUBLANES = 128, 8
BUFFER_BYTES = 2**20  # of a tile of keys or of values; each is held twice
LOGITS = 2**18  # in a tile, of one head: 1 MiB
QUERIES = 1024  # of a block of heads
UNROLLED = 16  # heads of all slots in a block

# (numbers in SMEM, slot, columns int32[1, T]) -> positions int32[1, T] of what the columns hold, for the window, and
# bool[1, T], whether they are seen but for the window.
See = Callable[[Any, Any, Array], tuple[Array, Array]]
# (numbers in SMEM, slot) -> int32[], the first column behind those that hold anything.
Ends = Callable[[Any, Any], Array]


def default_heads(heads: int, queries: int, width: int, itemsize: int) -> int:
    """Heads in a block: as many as divide theirs evenly and fit the buffers, for a step of the grid costs time too."""
    fits = lambda n: n * queries <= QUERIES and n * width * LANES * itemsize <= BUFFER_BYTES  # noqa: E731
    return max((n for n in range(1, heads + 1) if heads % n == 0 and fits(n)), default=1)


def default_tile(columns: int, heads: int, queries: int, width: int, itemsize: int) -> int:
    """Columns in a tile: the greatest multiple of LANES that fits the buffers, or all columns if they do."""
    most = min(BUFFER_BYTES // (heads * width * itemsize), LOGITS // queries) // LANES * LANES
    return min(columns, max(LANES, most))


def default_slots(slots: int, heads: int, queries: int, width: int, columns: int, itemsize: int) -> int:
    """Slots in a block whose tile is all columns: as many as divide theirs evenly, fit the buffers and are unrolled."""

    def fits(n: int) -> bool:
        rows = n * heads
        size = rows * width * max(columns, LANES) * itemsize
        return rows <= UNROLLED and rows * queries <= QUERIES and size <= BUFFER_BYTES

    return max((n for n in range(1, slots + 1) if slots % n == 0 and fits(n)), default=1)


def by_lanes(columns: int, width: int, natural: bool) -> bool:
    """Whether a TPU keeps an array of vectors with its columns innermost: in tiles of 8 x 128 the way that pads less.

    natural: whether they are so in the array's own order, which is kept if neither pads less.
    """
    padded = lambda rows, lanes: -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES  # noqa: E731
    innermost, outermost = padded(width, columns), padded(columns, width)
    return natural if innermost == outermost else innermost < outermost


def _kernel(
    *refs: Any,
    scalars: int,
    columns: int,
    query_scale: float,
    softcap: float,
    window: int,
    scaled: bool,
    key_axis: int,
    value_axis: int,
    see: See,
    ends: Ends,
) -> None:
    """One tile for one block of slots and heads.

    refs: the numbers in SMEM, q [n, m, Q, h], keys and values of n slots and m heads with the columns along key_axis
    and value_axis (0 or 1) of each, positions int32[n, Q, 1] if there is a window, scales f32[n, m, 1, T], results.
    """
    numbers, (q, keys, values, *rest) = refs[:scalars], refs[scalars:]
    position = rest.pop(0) if window else None
    key_scale, value_scale = (rest.pop(0), rest.pop(0)) if scaled else (None, None)
    weighted, greatest, total = rest
    block, number, tile = pl.program_id(0), pl.program_id(2), keys.shape[2 + key_axis]
    first = number * tile

    @pl.when(number == 0)
    def _() -> None:
        weighted[...] = jnp.zeros_like(weighted)
        greatest[...] = jnp.full_like(greatest, MASKED)
        total[...] = jnp.zeros_like(total)

    def look(slot: int) -> None:
        row = block * keys.shape[0] + slot
        column = first + jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)
        at, seen = see(numbers, row, column)
        seen = seen & (column < columns)
        if position is not None:
            seen = seen & (position[slot] - at < window)
        for head in range(keys.shape[1]):
            here = q[slot, head]
            contract = (((1,), (1 - key_axis,)), ((), ()))
            k = keys[slot, head].astype(here.dtype)
            logits = jax.lax.dot_general(here, k, contract, preferred_element_type=jnp.float32)
            if key_scale is not None:
                logits = logits * key_scale[slot, head]
            logits = logits * query_scale
            if softcap:
                logits = softcap * jnp.tanh(logits / softcap)
            logits = jnp.where(seen, logits, MASKED)
            before = greatest[slot, head]
            now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(logits - now), 0.0)
            fade = jnp.exp(before - now)
            greatest[slot, head] = now
            total[slot, head] = fade * total[slot, head] + jnp.sum(weights, axis=1, keepdims=True)
            if value_scale is not None:
                weights = jnp.where(seen, weights * value_scale[slot, head], 0.0)
            v = values[slot, head].astype(here.dtype)
            if columns % tile:  # behind the end a block holds anything, NaN too
                place = first + jax.lax.broadcasted_iota(jnp.int32, v.shape, value_axis)
                v = jnp.where(place < columns, v, jnp.zeros_like(v))
            contract = (((1,), (value_axis,)), ((), ()))
            new = jax.lax.dot_general(weights.astype(here.dtype), v, contract, preferred_element_type=jnp.float32)
            weighted[slot, head] = fade * weighted[slot, head] + new

    if keys.shape[0] == 1:
        pl.when(first < ends(numbers, block))(lambda: look(0))
    else:
        for slot in range(keys.shape[0]):
            look(slot)


def pallas_sums(
    q: Array,
    keys: Array,
    values: Array,
    numbers: tuple[Array, ...],
    position: Array | None,
    key_scale: Array | None,
    value_scale: Array | None,
    see: See,
    ends: Ends,
    *,
    query_scale: float,
    softcap: float,
    window: int,
    tile: int | None,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Sums of queries [N, K, Q, h]: f32[N, K, Q, h], and greatest and total f32[N, K, Q, 1].

    numbers: int32 arrays for `see` and `ends`; position: int32[N, Q] with a window; tile: columns at a time, a multiple
    of LANES. Rows that see nothing have sums of 0.
    """
    N, K, Q, h = q.shape
    S, itemsize = keys.shape[3], keys.dtype.itemsize
    heads = default_heads(K, Q, h, itemsize)
    tile = min(S, tile) if tile else default_tile(S, heads, Q, h, itemsize)
    n = default_slots(N, heads, Q, h, S, itemsize) if tile == S and heads == K else 1

    def used(p: Any, t: Any, numbers: Any) -> Any:
        """Behind the end of a slot the last tile in use stays: it is not fetched again."""
        if n > 1:
            return t
        return jnp.minimum(t, jax.lax.div(jnp.maximum(ends(numbers, p) - 1, 0), jnp.int32(tile)))

    of_block = lambda *shape: pl.BlockSpec((n, heads, *shape), lambda p, k, t, *numbers: (p, k, 0, 0))  # noqa: E731
    along = lambda rows: pl.BlockSpec(  # noqa: E731
        (n, heads, rows, tile), lambda p, k, t, *numbers: (p, k, 0, used(p, t, numbers))
    )
    down = pl.BlockSpec((n, heads, tile, h), lambda p, k, t, *numbers: (p, k, used(p, t, numbers), 0))
    # Turned round as a TPU keeps them, for the kernel takes rows of lanes only, and XLA would make them by a copy.
    key_axis, value_axis = int(by_lanes(S, h, True)), int(by_lanes(S, h, False))
    operands = [q, keys if key_axis else keys.swapaxes(2, 3), values.swapaxes(2, 3) if value_axis else values]
    specs = [of_block(Q, h), *(along(h) if axis else down for axis in (key_axis, value_axis))]
    if position is not None:
        operands.append(position[..., None])
        specs.append(pl.BlockSpec((n, Q, 1), lambda p, k, t, *numbers: (p, 0, 0)))
    scales = [x[:, :, None] for x in (key_scale, value_scale) if x is not None]  # [N, K, 1, S]
    operands += scales
    specs += [along(1)] * len(scales)

    axes = jax.typeof(q).manual_axis_type  # inside `jax.shard_map`, results vary as the inputs do
    shapes = (N, K, Q, h), (N, K, Q, 1), (N, K, Q, 1)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=axes) for shape in shapes]
    kernel = partial(
        _kernel, scalars=len(numbers), columns=S, query_scale=query_scale, softcap=softcap, window=window,
        scaled=bool(scales), key_axis=key_axis, value_axis=value_axis, see=see, ends=ends,
    )  # fmt: skip
    arrays: list[Any] = [*numbers, *operands, *results]
    return pl.pallas_call(
        kernel,
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(N // n, K // heads, pl.cdiv(S, tile)),
            in_specs=specs,
            out_specs=[of_block(Q, h), of_block(Q, 1), of_block(Q, 1)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * N * K * Q * S * h,
            transcendentals=(2 if softcap else 1) * N * K * Q * S,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),  # each once
        ),
        interpret=interpret,
        name="decode_attention",
    )(*numbers, *operands)


def pallas_prompts(
    q: Array,
    keys: Array,
    values: Array,
    length: Array,
    position: Array,
    key_scale: Array | None,
    value_scale: Array | None,
    *,
    query_scale: float,
    softcap: float,
    window: int,
    tile: int | None = None,
    interpret: bool = False,
) -> Part:
    """As `reference_prompts`, by the kernel."""
    P, K, W, R, h = q.shape
    S = keys.shape[3]

    def see(numbers: Any, slot: Any, column: Array) -> tuple[Array, Array]:
        length = numbers[0][slot]
        at = jnp.maximum(length - S, 0) + column
        return at, at < length

    sums = pallas_sums(
        q.reshape(P, K, W * R, h), keys, values, (length,), jnp.repeat(position, R, axis=1) if window else None,
        key_scale, value_scale, see, lambda numbers, slot: numbers[0][slot], query_scale=query_scale, softcap=softcap,
        window=window, tile=tile, interpret=interpret,
    )  # fmt: skip
    return Part(sums[0].reshape(q.shape), *(x.reshape(P, K, W, R) for x in sums[1:]))


def pallas_own(
    q: Array,
    keys: Array,
    values: Array,
    count: Array,
    step: Array,
    key_scale: Array | None,
    value_scale: Array | None,
    *,
    query_scale: float,
    softcap: float,
    window: int,
    tile: int | None = None,
    interpret: bool = False,
) -> Part:
    """As `reference_own`, by the kernel."""
    B, K, R, h = q.shape
    S = keys.shape[3]

    def see(numbers: Any, row: Any, column: Array) -> tuple[Array, Array]:
        age = numbers[1][0] - column
        age = jnp.where(age < 0, age + S, age)
        seen = age <= numbers[0][row]
        return age, seen & (age < window) if window else seen

    sums = pallas_sums(
        q, keys, values, (count, (step % S)[None]), None, key_scale, value_scale, see,
        lambda numbers, row: jnp.int32(S), query_scale=query_scale, softcap=softcap, window=0, tile=tile,
        interpret=interpret,
    )  # fmt: skip
    return Part(sums[0].reshape(B, K, 1, R, h), *(x.reshape(B, K, 1, R) for x in sums[1:]))
