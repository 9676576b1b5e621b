"""Rows that ended and still hold keys and values, and what a request that continues their tokens can copy of them.

A fork, or a conversation that continues, begins with tokens that a row has drawn before. Until another request takes
the row or the ring KV cache wraps around, their keys and values need not be recomputed (`best_reuse`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxrl_llm.sampling.requests import Prefix

LEAST_REUSED = 4  # fewer tokens are not worth a copy


class Kept(NamedTuple):
    """A row that ended and whose keys and values are still in the ring KV cache."""

    prefix: Prefix
    tokens: np.ndarray  # int32[n], after the prompt; the cache has keys and values of all but the last
    last: int  # step at which the last token was drawn
    copied: int | None = None  # decode steps until it was copied; None: it is in the ring KV cache itself

    def intact(self, steps: int, columns: int, usable: int | None = None) -> bool:
        """Whether the ring KV cache has not overwritten what attention to the first `usable` tokens reads."""
        n = len(self.tokens)
        oldest = max((n - 1 if usable is None else usable) - columns, 0)
        return (steps if self.copied is None else self.copied) - 1 - (self.last - n + 2 + oldest) < columns


class Reused(NamedTuple):
    """What a new row copies from a row that ended."""

    source: int  # row to copy from
    usable: int  # number of tokens whose keys and values are copied
    shift: int  # columns by which they move


def absolute_step(steps: int, column: int, columns: int) -> int:
    """The last step before `steps` that wrote to `column` of a ring KV cache with `columns` columns."""
    return steps - 1 - (steps - 1 - column) % columns


def best_reuse(
    kept: dict[int, Kept], prefix: Prefix, begun: np.ndarray, steps: int, columns: int, whole: bool = False
) -> Reused | None:
    """The row from which a request that continues `begun` can copy the most tokens; None if there is none.

    steps: decode steps so far. columns: smallest number of columns among the layers. Token j of a kept row is in column
    last - n + 2 + j (mod columns), and moves to column steps - own + j, where own is len(begun) - 1. whole: only a row
    all of whose tokens the request continues, as what layers carry is of all of them.
    """
    found, own = None, len(begun) - 1
    for row, one in kept.items():
        if one.prefix != prefix:
            continue
        tokens, n = one.tokens, len(one.tokens)
        most = min(n - 1, own)
        unlike = np.flatnonzero(tokens[:most] != begun[:most])
        usable = int(unlike[0]) if len(unlike) else most
        intact = one.intact(steps, columns, usable)
        intact = intact and not (whole and usable < n - 1)
        if usable >= LEAST_REUSED and intact and (found is None or usable > found.usable):
            found = Reused(row, usable, steps - own - one.last + n - 2)
    return found
