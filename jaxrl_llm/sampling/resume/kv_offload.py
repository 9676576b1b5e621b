"""Keys and values of conversations that gave up their rows, until they come back.

A conversation that waits for its environment keeps its row of the ring KV cache as long as no other request needs it.
When one does, the two change places: what the row holds goes to a store beside the ring KV cache, and what the store
holds of the other request comes to the row. The least recently used entry is given up where the store is full.

Rows that ended still hold keys and values too. A fork, or a conversation that continues, begins with tokens that a row
has drawn before. Until another request takes the row or the ring KV cache wraps around, they need not be recomputed
(`best_reuse`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.decode import RingCache
from jaxrl_llm.sampling.requests import Prefix, Request
from jaxrl_llm.sampling.scheduler import Assignment
from jaxrl_llm.sampling.weights import Weights

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


@partial(jax.jit, static_argnames=("split",))
def take(cache: Any, row: Array, split: bool) -> Any:
    """A row, int32[1], of a cache; arrays [1, ...].

    split: rows are spread over devices, where a gather and a scatter stay on the device of the row. On one device
    slices are faster.
    """
    return jax.tree.map(lambda x: x[row] if split else jax.lax.dynamic_slice_in_dim(x, row[0], 1), cache)


@partial(jax.jit, static_argnames=("split",), donate_argnames=("cache",))
def put(cache: Any, new: Any, row: Array, split: bool) -> Any:
    """Write a row, as `take` returns it. It is a program of its own, or XLA would copy the cache that it reads too."""

    def written(old: Array, x: Array) -> Array:
        return old.at[row].set(x) if split else jax.lax.dynamic_update_slice_in_dim(old, x, row[0], 0)

    return jax.tree.map(written, cache, new)


class Store:
    """Rows that ended: those that are still in the ring KV cache (`rows`), and those beside it (`parked`)."""

    def __init__(self, cache: RingCache | None, size: int, split: bool = False, whole: bool = False) -> None:
        """cache: with `size` rows; None for a store of none. split: see `take`; whole: see `best_reuse`."""
        self._split, self._whole = split, whole
        self._cache = None if cache is None else _contents(cache)
        self.size = size
        self.rows: dict[int, Kept] = {}  # by row, the oldest first
        self.parked: dict[int, Kept] = {}  # by place, the least recently used first

    def best(self, request: Request, steps: int, columns: int) -> Reused | None:
        """From what a request can continue; places of the store are the negative rows -1, -2, ..."""
        beside = {-1 - place: kept for place, kept in self.parked.items()}
        return best_reuse({**self.rows, **beside}, request.prefix, request.begun.token, steps, columns, self._whole)

    def row_for(self, requests: Mapping[int, Request], steps: int, columns: int, number: int, free: list[int]) -> int:
        """The free row that a request, given by its number, takes: its own, else one that holds nothing, else the one
        that ended first."""
        request = requests[number]
        if request.begun.size > 1 and (how := self.best(request, steps, columns)) and how.source in free:
            return how.source
        empty = [row for row in free if row not in self.rows]
        return empty[0] if empty else next(row for row in self.rows if row in free)

    def park(self, ring_cache: RingCache, row: int, steps: int, place: int | None = None) -> RingCache:
        """Move what a row holds to the store, to `place`, whose contents come to the row."""
        if place is None:
            place = next((p for p in range(self.size) if p not in self.parked), next(iter(self.parked), 0))
        at, to, ring = np.asarray([row], np.int32), np.asarray([place], np.int32), _contents(ring_cache)
        held, beside = take(ring, at, self._split), take(self._cache, to, self._split)
        ring, self._cache = put(ring, beside, at, self._split), put(self._cache, held, to, self._split)
        coming, going = self.parked.pop(place, None), self.rows.pop(row, None)
        if going is not None:
            self.parked[place] = going._replace(copied=steps)
        if coming is not None:
            self.rows[row] = coming
        layers, experts = ring
        return ring_cache._replace(layers=layers, drawn=ring_cache.drawn._replace(experts=experts))

    def park_overwritten(self, ring_cache: RingCache, steps: int, more: int, columns: int) -> RingCache:
        """Move the rows of which the next `more` decode steps would overwrite something."""
        if self.size:
            for row, kept in list(self.rows.items()):
                if not kept.intact(steps + more, columns) and kept.intact(steps, columns):
                    ring_cache = self.park(ring_cache, row, steps)
                    self.rows.pop(row, None)  # what came was given up
        return ring_cache


def store_of(policy: Policy, weights: Weights, make: tuple[Any, ...], size: int) -> Store:
    """An empty store of `size` rows. make: a function that gives its cache, and its arguments."""
    split = row_shards(weights.mesh, SAMPLED_ROWS) > 1
    return Store(weights.zeros(*make) if size else None, size, split, policy.config.recurrent)


def place_rows(
    store: Store, ring_cache: RingCache, begun: list[Assignment], requests: Mapping[int, Request], steps: int,
    columns: int, extend: Callable[[RingCache, list[tuple[Assignment, Reused]]], RingCache],
    assigned: list[Assignment],
) -> tuple[RingCache, list[Assignment]]:  # fmt: skip
    """Bring to the rows of requests what the caches hold of them, and make room for it.

    assigned: all rows that requests take; begun: those that begin with tokens. extend: copies and extends rows.
    Returns the ring KV cache and the rows for which nothing is held.
    """
    pending, missed = list[tuple[Assignment, Reused]](), list[Assignment]()
    taken = list[int]()  # rows that still hold what they held, for others that continue it too

    def copy_pending() -> None:
        nonlocal ring_cache, pending, taken
        ring_cache = extend(ring_cache, pending)
        for row in taken:
            store.rows.pop(row, None)
        pending, taken = [], []

    for place in assigned:
        how = store.best(requests[place.request], steps, columns) if place in begun else None
        beside = how is not None and how.source < 0
        goes = place.row in store.rows and (how is None or how.source != place.row)
        if store.size and (beside or goes):
            if any(used.source == place.row for _, used in pending):
                copy_pending()
            ring_cache = store.park(ring_cache, place.row, steps, -1 - how.source if how and beside else None)
        if how is not None:
            pending.append((place, how._replace(source=place.row) if beside else how))
        elif place in begun:
            missed.append(place)
        if how is not None or not store.size:
            taken.append(place.row)
        else:
            store.rows.pop(place.row, None)
    copy_pending()
    return ring_cache, missed


def _contents(cache: RingCache) -> Any:
    return cache.layers, cache.drawn.experts
