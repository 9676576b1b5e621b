"""Which keys and values of rows that ended are still in the ring KV cache, for requests that go on from them.

A fork, or a conversation that comes back, begins with tokens that a row has drawn before. While no other request took
the row, and before the ring wraps around, their keys and values need not be computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = 4  # tokens that are worth a copy


class Kept(NamedTuple):
    """A row that ended, as its cache holds it."""

    prompt: tuple[int, ...]
    tokens: np.ndarray  # int32[n] after the prompt; the cache has keys and values of all but the last
    last: int  # step at which the last one was drawn


class Reused(NamedTuple):
    """What a row takes over from a kept one."""

    source: int  # row
    usable: int  # tokens whose keys and values are taken over
    shift: int  # columns by which they move in the ring


def absolute_step(steps: int, column: int, columns: int) -> int:
    """The newest step before `steps` that wrote to a column of a ring of `columns`."""
    return steps - 1 - (steps - 1 - column) % columns


def best(kept: dict[int, Kept], prompt: tuple[int, ...], begun: np.ndarray, steps: int, columns: int) -> Reused | None:
    """From which row a request that was begun with these tokens can take over the most; None for no row.

    steps: taken so far. columns: of the shortest ring among the layers. The token with index j of a kept row stands in
    column last - n + 2 + j; of the row that goes on in steps - own + j, where own is one less than it has tokens.
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
