"""Shared parts of the Pallas attention kernels: block sizes, and the update of the running sums by one tile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.decode_attention.reference import MASKED, Numbers

Array = jax.Array

LANES, SUBLANES = 128, 8
BUFFER_BYTES = 2**20  # most bytes of a tile of keys or values, which is double-buffered
LOGITS = 2**18  # most logits of one head in a tile: 1 MiB
QUERIES = 1024  # most queries of a block of heads
UNROLLED = 16  # most heads, over all slots of a block, that are unrolled


class Tiles(NamedTuple):
    """What is static of the kernels beside sizes of blocks."""

    columns: int  # of the cache
    key_axis: int  # along which the columns of keys are in a tile, 0 or 1
    value_axis: int
    scaled: bool  # whether keys and values have scales
    numbers: Numbers


def block_sizes(
    slots: int, heads: int, queries: int, width: int, columns: int, itemsize: int, tile: int | None
) -> tuple[int, int, int]:
    """Slots, heads and columns of a block, as many as fit, because each step of the grid has overhead.

    Heads first, then columns; a block has several slots only if it has all heads and columns. tile: requested columns,
    or None.
    """

    def most(count: int, fits: Callable[[int], bool]) -> int:
        return max((n for n in range(1, count + 1) if count % n == 0 and fits(n)), default=1)

    each = width * itemsize  # bytes of a column
    block = most(heads, lambda n: n * queries <= QUERIES and n * LANES * each <= BUFFER_BYTES)
    fitting = min(BUFFER_BYTES // (block * each), LOGITS // queries)
    tile = tile or max(LANES, fitting // LANES * LANES)
    if tile < columns or block < heads:
        return 1, block, min(columns, tile)
    size = heads * max(columns, LANES) * each  # bytes of a slot
    rows = heads * queries
    together = most(slots, lambda n: n * heads <= UNROLLED and n * rows <= QUERIES and n * size <= BUFFER_BYTES)
    return together, heads, columns


def by_lanes(columns: int, width: int, natural: bool) -> bool:
    """Whether XLA for TPUs lays out an array of vectors with its columns innermost (along lanes).

    It chooses the layout that needs less padding to tiles of 8 x 128. natural: whether columns are innermost in the
    array's own order, which it keeps in a tie.
    """

    def padded(rows: int, lanes: int) -> int:
        return -(-rows // SUBLANES) * SUBLANES * -(-lanes // LANES) * LANES

    innermost, outermost = padded(width, columns), padded(columns, width)
    return natural if innermost == outermost else innermost < outermost


def capped(logits: Array, numbers: Numbers) -> Array:
    """Logits from products of queries and keys: scaled and soft-capped."""
    softcap = numbers.softcap
    logits = logits * numbers.query_scale
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def add_tile(
    sums: tuple[Any, Any, Any], here: tuple[int, int], q: Array, keys: Array, values: Array, seen: Array,
    key_scale: Array | None, value_scale: Array | None, first: Any, of: Tiles,
) -> None:  # fmt: skip
    """Add a tile of T columns, first, first + 1, ..., to the running sums of the queries q [Q, h] of a slot and head.

    sums: references to acc f32[i, j, Q, h], m and l f32[i, j, Q, 1]; here: indices of the slot and head. keys, values:
    [h, T] or [T, h], with columns along the axes of `Tiles`; seen: bool, broadcasts to [Q, T], false from `columns` on,
    where the tile is undefined and can be NaN; scales: f32[1, T].
    """
    acc, m, l = sums
    contract = (((1,), (1 - of.key_axis,)), ((), ()))
    logits = jax.lax.dot_general(q, keys.astype(q.dtype), contract, preferred_element_type=jnp.float32)
    logits = capped(logits if key_scale is None else logits * key_scale, of.numbers)
    logits = jnp.where(seen, logits, MASKED)
    before = m[here]
    now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(logits - now), 0.0)
    rescale = jnp.exp(before - now)
    m[here] = now
    l[here] = rescale * l[here] + jnp.sum(weights, axis=1, keepdims=True)
    if value_scale is not None:
        weights = jnp.where(seen, weights * value_scale, 0.0)
    v = values.astype(q.dtype)
    if of.columns % v.shape[of.value_axis]:
        place = first + jax.lax.broadcasted_iota(jnp.int32, v.shape, of.value_axis)
        v = jnp.where(place < of.columns, v, jnp.zeros_like(v))
    contract = (((1,), (of.value_axis,)), ((), ()))
    new = jax.lax.dot_general(weights.astype(q.dtype), v, contract, preferred_element_type=jnp.float32)
    acc[here] = rescale * acc[here] + new
