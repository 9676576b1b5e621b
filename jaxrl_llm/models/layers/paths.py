"""Where the tokens of packed rows continue each other, for layers that carry a state from token to token.

The tokens of a packing (`packing`) are paths of tries. A run is a part of a path that nothing branches from but at its
end: its tokens stand next to each other, and no chunk of `CHUNK` tokens has those of two runs. A run begins with the
state that the run before it on its path left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.layers.delta import CHUNK
from jaxrl_llm.models.layers.recurrent import convolve

Array = jax.Array


class Paths(NamedTuple):
    """Where the tokens of rows continue each other; S rows of T tokens, n = T / CHUNK chunks of each."""

    entry: Array  # int32[S, n], what a chunk begins with, see `delta_rule`
    before: Array  # int32[S, T], place of the token before; -1: none
    starts: Array  # int32[S, B], places of the runs' first tokens; T where there is none


def runs_of(enter: Any, leave: Any, array: Any = jnp) -> Any:
    """bool[..., W]: which tokens begin a run. For the numbers see `PackedRows`; array: numpy or jax.numpy."""
    before = [array.concatenate([array.zeros_like(x[..., :1]), x[..., :-1]], axis=-1) for x in (enter, leave)]
    return (enter > 0) & ~((before[0] > 0) & (before[0] + 1 == enter) & (before[1] == leave))


def paths_of(enter: Array, leave: Array, runs: int) -> Paths:
    """The paths of tokens with these numbers, int32[S, T] (`PackedRows`); every token's parent is before it in its row.

    runs: of a row, at most (static). T is a multiple of CHUNK.
    """
    S, T = enter.shape
    n, rows = T // CHUNK, jnp.arange(S)[:, None]
    first, real = runs_of(enter, leave), enter > 0
    starts = jnp.argsort(~first, axis=1, stable=True)[:, :runs]
    begins = jnp.take_along_axis(first, starts, axis=1)
    # The last token of each run: the latest before the next run, or of the row.
    latest = jax.lax.cummax(jnp.where(real, jnp.arange(T), -1), axis=1)
    following = jnp.where(begins, starts, T)
    following = jnp.concatenate([following[:, 1:], jnp.full((S, 1), T, following.dtype)], axis=1)
    ends = jnp.take_along_axis(latest, following - 1, axis=1)
    # What a run continues is the last token of another: that with the largest number whose interval holds its own.
    number = jnp.take_along_axis(enter, starts, axis=1)[:, :, None]
    low, high = (jnp.take_along_axis(x, jnp.maximum(ends, 0), axis=1)[:, None] for x in (enter, leave))
    holds = jnp.where(begins[:, None] & (low < number) & (number < high), low, 0)
    parent = jnp.where(
        jnp.max(holds, axis=2) > 0, jnp.take_along_axis(ends, jnp.argmax(holds, axis=2), axis=1), -1
    )  # fmt: skip
    entry = jnp.broadcast_to(jnp.arange(n) - 1, (S, n))
    entry = entry.at[rows, jnp.where(begins, starts // CHUNK, n)].set(parent // CHUNK, mode="drop")
    starts = jnp.where(begins, starts, T)
    before = jnp.where(real, jnp.arange(T) - 1, -1).at[rows, starts].set(parent, mode="drop")
    return Paths(*(x.astype(jnp.int32) for x in (entry, before, starts)))


def convolve_paths(x: Array, weight: Array, paths: Paths) -> Array:
    """`convolve` along paths: x [S, T, C], as if tokens followed each other, and then the first of each run again."""
    taps, (S, T) = weight.shape[0], x.shape[:2]
    out = convolve(x, weight, lambda x, steps: jnp.pad(x, ((0, 0), (steps, 0), (0, 0)))[:, :T])
    rows = jnp.arange(S)[:, None]
    place = (paths.starts[:, :, None] + jnp.arange(taps - 1)).reshape(S, -1)
    place = jnp.where(jnp.repeat(paths.starts, taps - 1, axis=1) < T, place, T)

    def earlier(at: Array) -> Array:
        return jnp.where(at >= 0, jnp.take_along_axis(paths.before, jnp.maximum(at, 0), axis=1), -1)

    at = [jnp.minimum(place, T - 1)]
    for _ in range(taps - 1):
        at.append(earlier(at[-1]))
    each = jnp.stack(at[::-1], axis=2)  # [S, places, taps], the oldest first
    found = jnp.where((each >= 0)[..., None], x[rows[..., None], jnp.maximum(each, 0)], 0)
    again = jnp.sum(found * weight, axis=2, dtype=out.dtype)
    return out.at[rows, place].set(again, mode="drop")
