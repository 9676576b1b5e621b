"""Where the tokens of packed rows continue each other, for layers that carry a state from token to token.

The tokens of a packing (`packing`) are paths of tries. A run is a part of a path that nothing branches from but at its
end: its tokens stand next to each other, from the beginning of a chunk of `CHUNK` places on, and the rest of its last
chunk is empty. A run begins with the state that the run before it on its path left.
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
    before = jnp.where(real, jnp.arange(T) - 1, -1).at[rows, jnp.where(begins, starts, T)].set(parent, mode="drop")
    return Paths(entry.astype(jnp.int32), before.astype(jnp.int32))


def convolve_paths(x: Array, weight: Array, paths: Paths) -> Array:
    """`convolve` along paths, x [S, T, C]: in each chunk by itself, and then what the tokens before it add."""
    taps, (S, _, C) = weight.shape[0], x.shape
    own = x.reshape(S, -1, CHUNK, C)
    out = convolve(own, weight, lambda x, steps: jnp.pad(x, ((0, 0), (0, 0), (steps, 0), (0, 0)))[:, :, :CHUNK])
    at = [paths.before[:, ::CHUNK]]  # of the first token of each chunk, the nearest first
    for _ in range(taps - 2):
        at.append(jnp.where(at[-1] >= 0, jnp.take_along_axis(paths.before, jnp.maximum(at[-1], 0), axis=1), -1))
    each = jnp.stack(at, axis=2)
    window = jnp.where((each >= 0)[..., None], x[jnp.arange(S)[:, None, None], jnp.maximum(each, 0)], 0)
    more = [
        sum(window[:, :, back - place - 1] * weight[-1 - back] for back in range(place + 1, taps))
        for place in range(taps - 1)
    ]
    added = jnp.pad(jnp.stack(more, axis=2), ((0, 0), (0, 0), (0, CHUNK - taps + 1), (0, 0)))
    return (out + added).reshape(x.shape)
