"""Where the tokens of packed rows continue each other, for layers that carry a state from token to token.

The tokens of a packing (`packing`) are paths of tries. A run is a part of a path that nothing branches from but at its
end: its tokens stand next to each other. Runs are cut into chunks of `CHUNK` tokens, the last one shorter, and a run
begins with the state that the run before it on its path left (`delta.chunked`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
CHUNK = 32  # tokens of a chunk


class Paths(NamedTuple):
    """Where the tokens of one level of a packing continue each other; R packed rows of W tokens, n chunks of each."""

    chunk: Array  # int32[R, n, CHUNK], place in the row of a chunk's tokens; W where there is none
    of_token: Array  # int32[R, W], place of a token among those of its row's chunks
    entry: Array  # int32[R, n], what a chunk begins with, see `delta.chunked`
    starts: Array  # int32[R, runs], chunks of the parent's row that runs begin with
    before: Array  # int32[R, W], the token before, in the row; W + its place in the parent's row; -1: none


def runs_of(enter: Any, leave: Any, array: Any = jnp) -> Any:
    """bool[..., W]: which tokens begin a run. For the numbers see `PackedRows`; array: numpy or jax.numpy."""
    real = enter > 0
    places = array.where(real, array.arange(enter.shape[-1]), -1)
    latest = jax.lax.cummax(places, axis=places.ndim - 1) if array is jnp else array.maximum.accumulate(places, axis=-1)
    before = array.concatenate([array.full_like(latest[..., :1], -1), latest[..., :-1]], axis=-1)
    known = array.maximum(before, 0)
    follows = (before >= 0) & (array.take_along_axis(enter, known, axis=-1) + 1 == enter)
    return real & ~(follows & (array.take_along_axis(leave, known, axis=-1) == leave))


def paths_of(rows: Any, runs: int, parents: Any = None, of_parents: Paths | None = None) -> Paths:
    """The paths of packed rows (`PackedRows`) with at most so many runs each.

    parents: the row of prefixes [R, W0] that each row continues, and its paths, of that row each.
    """
    enter, leave = rows.enter, rows.leave
    R, W = enter.shape
    real, first = enter > 0, runs_of(enter, leave)
    run = jnp.where(real, jnp.cumsum(first, axis=1) - 1, runs)
    starting = jnp.argsort(~first, axis=1, stable=True)[:, :runs]  # places of the runs' first tokens
    begins = jnp.take_along_axis(first, starting, axis=1)
    rank = jnp.cumsum(real, axis=1) - 1
    first_rank = jnp.take_along_axis(rank, starting, axis=1)
    within = rank - jnp.take_along_axis(first_rank, jnp.minimum(run, runs - 1), axis=1)
    size = jnp.sum(run[:, :, None] == jnp.arange(runs), axis=1)
    chunks = -(-size // CHUNK)
    first_chunk = jnp.cumsum(chunks, axis=1) - chunks
    n = -(-W // CHUNK) + runs - 1
    at = jnp.take_along_axis(first_chunk, jnp.minimum(run, runs - 1), axis=1) + within // CHUNK
    of_token = jnp.where(real, at * CHUNK + within % CHUNK, n * CHUNK)
    place = jnp.broadcast_to(jnp.arange(W), (R, W))
    chunk = jnp.full((R, n * CHUNK + 1), W).at[jnp.arange(R)[:, None], of_token].set(place)[:, :-1]
    # What each run continues: the token with the largest number whose interval holds the run's.
    number = jnp.take_along_axis(enter, starting, axis=1)[:, :, None]

    def latest(enter: Array, leave: Array) -> tuple[Array, Array]:
        """The place of that token in rows, and its number, 0 where there is none."""
        holds = (enter[:, None] > 0) & (enter[:, None] < number) & (number < leave[:, None])
        numbers = jnp.where(holds & begins[:, :, None], enter[:, None], 0)
        return jnp.argmax(numbers, axis=2), jnp.max(numbers, axis=2)

    parent, found = latest(enter, leave)
    known = jnp.take_along_axis(of_token, parent, axis=1) // CHUNK
    begun_with = jnp.where(found > 0, known, -1)
    previous = jnp.where(found > 0, parent, -1)
    starts = jnp.zeros((R, runs), jnp.int32)
    if of_parents is not None:
        outer, found_there = latest(parents.enter, parents.leave)
        there = (found == 0) & (found_there > 0)
        starts = jnp.where(there, jnp.take_along_axis(of_parents.of_token, outer, axis=1) // CHUNK, 0)
        begun_with = jnp.where(there, n + jnp.arange(runs), begun_with)
        previous = jnp.where(there, W + outer, previous)
    of_runs = jnp.where(begins, first_chunk, n)
    entry = jnp.broadcast_to(jnp.arange(n) - 1, (R, n))
    entry = jnp.pad(entry, ((0, 0), (0, 1))).at[jnp.arange(R)[:, None], of_runs].set(begun_with)[:, :n]
    along = jnp.take_along_axis(jnp.argsort(~real, axis=1, stable=True), jnp.maximum(rank - 1, 0), axis=1)
    of_first = jnp.take_along_axis(previous, jnp.minimum(run, runs - 1), axis=1)
    before = jnp.where(real, jnp.where(first, of_first, along), -1)
    return Paths(*(x.astype(jnp.int32) for x in (chunk.reshape(R, n, CHUNK), of_token, entry, starts, before)))


def in_chunks(x: Array, paths: Paths) -> Array:
    """What tokens [R, W, ...] bring, by chunks [R, n, CHUNK, ...]; zeros where there is no token."""
    R, n, _ = paths.chunk.shape
    padded = jnp.pad(x, [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))
    at = paths.chunk.reshape(R, -1, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(padded, at, axis=1).reshape(R, n, CHUNK, *x.shape[2:])


def out_of_chunks(x: Array, paths: Paths) -> Array:
    """The inverse of `in_chunks`."""
    flat = x.reshape(x.shape[0], -1, *x.shape[3:])
    flat = jnp.pad(flat, [(0, 0), (0, 1)] + [(0, 0)] * (flat.ndim - 2))
    return jnp.take_along_axis(flat, paths.of_token.reshape(*paths.of_token.shape, *[1] * (flat.ndim - 2)), axis=1)
