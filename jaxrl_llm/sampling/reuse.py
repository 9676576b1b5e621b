"""Reuse of keys and values that are still in the ring KV cache.

A fork, or a conversation that continues, begins with tokens that a row has drawn before. Until another request takes
the row or the ring KV cache wraps around, their keys and values need not be recomputed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 4  # fewer tokens are not worth a copy


class Kept(NamedTuple):
    """A row that ended and whose keys and values are still in the ring KV cache."""

    prompt: tuple[int, ...]
    tokens: np.ndarray  # int32[n], after the prompt; the cache has keys and values of all but the last
    last: int  # step at which the last token was drawn


class Reused(NamedTuple):
    """What a new row copies from a row that ended."""

    source: int  # row to copy from
    usable: int  # number of tokens whose keys and values are copied
    shift: int  # columns by which they move


def absolute_step(steps: int, column: int, columns: int) -> int:
    """The last step before `steps` that wrote to `column` of a ring KV cache with `columns` columns."""
    return steps - 1 - (steps - 1 - column) % columns


def best_reuse(
    kept: dict[int, Kept], prompt: tuple[int, ...], begun: np.ndarray, steps: int, columns: int
) -> Reused | None:
    """The row from which a request that continues `begun` can copy the most tokens; None if there is none.

    steps: decode steps so far. columns: smallest number of columns among the layers. Token j of a kept row is in column
    last - n + 2 + j (mod columns), and moves to column steps - own + j, where own is len(begun) - 1.
    """
    found, own = None, len(begun) - 1
    for row, (of, tokens, last) in kept.items():
        if of != prompt:
            continue
        n = len(tokens)
        most = min(n - 1, own)
        unlike = np.flatnonzero(tokens[:most] != begun[:most])
        usable = int(unlike[0]) if len(unlike) else most
        oldest = max(usable - columns, 0)
        intact = steps - 1 - (last - n + 2 + oldest) < columns
        if usable >= LEAST and intact and (found is None or usable > found.usable):
            found = Reused(row, usable, steps - own - last + n - 2)
    return found
