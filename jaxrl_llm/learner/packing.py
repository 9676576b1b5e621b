"""Packing on the host: the tokens of a slice of rows into packed rows of one length (`models.packing`).

What rows share is there once (`prefix_trie`). Subtrees and single completions are put side by side, the longest first,
each into the first row that has room. Sizes are of a short list, so that few programs are compiled.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.learner.prefix_trie import (
    LEAST_SHARED,
    Array,
    DepthFirst,
    PrefixTrie,
    TokenRows,
    number_tokens,
    places,
    prefix_tries,
    rounded_up,
    subtrees,
)
from jaxrl_llm.models.layers.delta import CHUNK
from jaxrl_llm.models.packing import PackedRows, Packing, runs_of

SMALL = 512  # places in packed rows: fewer are not worth a program of their own
COARSE = 2048  # places up to which compiling another program costs more than a third of padding


def first_fit(sizes: Sequence[int], width: int, keys: Sequence[int] | None = None) -> tuple[Array, Array, list[int]]:
    """Put pieces into rows of `width`, the longest first; only those of one key share a row.

    Returns each piece's row and its offset there, and the key of each row.
    """
    row_of, offset = np.zeros(len(sizes), int), np.zeros(len(sizes), int)
    room, owner = np.zeros(len(sizes), int), np.full(len(sizes), -1)
    used = 0
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        key = 0 if keys is None else keys[piece]
        fits = np.flatnonzero((owner[:used] == key) & (room[:used] >= sizes[piece]))
        if len(fits):
            row = int(fits[0])
        else:
            row, used = used, used + 1
            room[row], owner[row] = width, key
        row_of[piece], offset[piece] = row, width - room[row]
        room[row] -= sizes[piece]
    return row_of, offset, owner[:used].tolist()


Pieces = tuple[list[int], list[int]]  # sizes of pieces, and the keys of `first_fit`


def fewest_places(
    longest: int, pieces: Callable[[int], Sequence[Pieces]], widths: Sequence[int], rows: int, multiple: int = 1
) -> tuple[int, int]:
    """Length and number of packed rows for which all slices need the fewest places, preferring short rows.

    pieces: those of each slice, given the length of packed rows. widths: to choose from, as multiples of `longest`.
    rows: of a slice. multiple: of which the length must be one. Sizes of small batches are coarser, so that batches
    whose completions get shorter share a program.
    """
    found = []
    for times in widths:
        width = rounded_up(bucket(times * longest, least=16, per_octave=2), multiple)
        needed = max(len(first_fit(sizes, width, keys)[2]) for sizes, keys in pieces(width))
        coarse = 8 < needed <= COARSE // width
        count = max(bucket(needed, per_octave=2) if coarse else bucket(needed, 1), min(SMALL // width, rows))
        margin = 1.5 if needed * width <= COARSE else 1.1  # what longer rows must save
        found.append((count * width * (1 if times == 1 else margin), width, count))
    return min(found)[1:]


def size_of_prefixes(
    split: Sequence[Sequence[PrefixTrie]], groups: int, columns: int, multiple: int = 1, chunk: int = 1
) -> tuple[int, int]:
    """Length and number of the rows for prefixes.

    columns: L of the batch, which no prefix exceeds. multiple: of which the length must be one; chunk: see `pack_rows`.
    """
    prefixes = [[rounded_up(trie.prefix, chunk) for trie in part] for part in split]
    longest = max((prefix for part in prefixes for prefix in part), default=1)
    count = max(groups, *map(len, prefixes))
    if count * columns < SMALL:  # the longest prefix changes from batch to batch: completions of a group may be equal
        return rounded_up(bucket(max(longest, columns), least=16), multiple), count
    after = max(int(sum(trie.lengths.sum() for trie in part)) for part in split)
    # A row for each prompt, unless that wastes much: the fewer sizes there are, the fewer programs are compiled.
    width = rounded_up(bucket(longest, least=16), multiple)
    if count * width - max(map(sum, prefixes)) > (count * width + after) / 8:
        pieces: list[Pieces] = [(part, [0] * len(part)) for part in prefixes]  # which fit together in any row
        return fewest_places(longest, lambda width: pieces, (1, 2, 4), groups, multiple)
    return width, count


def _sizes(part: Sequence[PrefixTrie], prefix_width: int, width: int, chunk: int) -> Pieces:
    """How many places each subtree of a slice takes, and its row of prefixes."""
    rows, _, _ = first_fit([rounded_up(trie.prefix, chunk) for trie in part], prefix_width)
    found = [
        (places(trie, low, high, chunk), int(row))
        for trie, row in zip(part, rows, strict=True)
        if trie.lengths.any()
        for low, high in subtrees(trie, width, chunk)
    ]
    return [size for size, _ in found], [row for _, row in found]


class Assigned(NamedTuple):
    """The tries of a slice, assigned to packed rows. A piece is (packed row, offset, tokens)."""

    prefixes: list[tuple[int, int, DepthFirst]]
    suffixes: list[tuple[int, int, DepthFirst]]
    parents: Array  # int[rows of suffixes]: the row of prefixes that each continues
    actions: Array  # int[actions, 5]: row, column, level, packed row, offset in it


def assign(part: Sequence[PrefixTrie], prefix_width: int, suffix_width: int, columns: int, chunk: int = 1) -> Assigned:
    """Assign the tries of a slice to packed rows. columns: L of the batch; chunk: see `pack_rows`."""
    tries, number = [], 1
    for trie in part:
        tries.append(number_tokens(trie, suffix_width, columns, number, chunk))
        number = int(tries[-1].prefix.leave[0])
    rows, offsets, _ = first_fit([rounded_up(trie.prefix, chunk) for trie in part], prefix_width)
    prefixes = [(int(rows[i]), int(offsets[i]), t.prefix) for i, t in enumerate(tries)]
    branching = [(i, t) for i, t in enumerate(tries) if part[i].lengths.any()]
    pieces = [(i, j, tokens) for i, t in branching for j, tokens in enumerate(t.subtrees)]
    lengths = [len(tokens.source) for *_, tokens in pieces]
    where, shift, parents = first_fit(lengths, suffix_width, [int(rows[i]) for i, *_ in pieces])
    suffixes = [(int(where[k]), int(shift[k]), tokens) for k, (*_, tokens) in enumerate(pieces)]
    at = {(i, j): (int(where[k]), int(shift[k])) for k, (i, j, _) in enumerate(pieces)}
    actions = [np.zeros((0, 5), int)]
    for i, (trie, numbered) in enumerate(zip(part, tries, strict=True)):
        for member, (j, path) in zip(trie.members, numbered.paths, strict=True):
            own = member.depth >= trie.prefix
            row, start = at.get((i, j), (0, 0))
            inside = np.concatenate([np.zeros(trie.prefix, int), path])[member.depth]
            actions.append(np.stack([
                np.full(len(own), member.row), member.action, own, np.where(own, row, rows[i]),
                np.where(own, start + inside, offsets[i] + member.depth),
            ], axis=1))  # fmt: skip
    return Assigned(prefixes, suffixes, np.array(parents, int), np.concatenate(actions))


def pack_rows(
    rows: TokenRows, slices: Sequence[Array], devices: int = 1, columns: int = 1, multiple: int = 1, runs: bool = False
) -> Packing:
    """A packing of each slice of the batch's rows, stacked along a first axis: int32[len(slices), ...], on the host.

    slices: rows int[n], all of one length; a packing speaks of a row by its place in its slice. devices: over which
    packed rows are to be spread; their numbers are multiples of it, and suffixes stand with their prefixes. columns:
    devices over which the tokens of each row are to be spread, an equal part on each; their numbers are multiples of
    it. multiple: of which the part of a row on a device is one. runs: for layers that carry states, count the runs of
    rows (`models.packing.Paths`), and let each begin with a chunk. Actions are listed with the device that has their
    state.
    """
    chunk = CHUNK if runs else 1
    multiple = math.lcm(multiple, chunk)
    n, L = len(slices[0]), rows.tokens.shape[1]
    split = [prefix_tries(rows.of(chosen), np.arange(n)) for chosen in slices]
    groups = max(len(np.unique(rows.group[chosen])) for chosen in slices)
    W0, R0 = size_of_prefixes(split, groups, L, columns * multiple, chunk)
    trees = any(trie.shared.max() >= LEAST_SHARED for part in split for trie in part)
    longest = max((int(trie.lengths.max()) for part in split for trie in part), default=0)
    W1, R1 = 0, 0
    if longest:

        def pieces_of(width: int) -> list[Pieces]:
            return [_sizes(part, W0, width, chunk) for part in split]

        W1, R1 = fewest_places(longest + 1, pieces_of, (1, 2, 4) if trees else (1, 2), n, columns * multiple)
    assigned = [assign(part, W0, W1, L, chunk) for part in split]
    R0 = rounded_up(R0, devices)
    each = bucket(max(int(np.bincount(a.parents, minlength=1).max()) for a in assigned), 1)
    if devices > 1:
        R1 = R0 * each
    tiles = _Tiles((R0, W0), (R1, W1), devices, columns)
    listed = [_listed(a, tiles) for a in assigned]
    most = max(int(np.bincount(actions.shard, minlength=1).max()) for actions in listed)
    M = _share(most, (R1 * W1 or R0 * W0) // (devices * columns))
    packed = [_fill(a, actions, tiles, M, n) for a, actions in zip(assigned, listed, strict=True)]
    found = jax.tree.map(lambda *xs: np.stack(xs), *packed)
    if not runs:
        return found
    of_rows = (runs_of(level.enter, level.leave, np).sum(axis=-1).max() for level in found.levels)
    return found.replace(runs=bucket(int(max(of_rows)), least=1, per_octave=1))


class _Tiles(NamedTuple):
    """The sizes of both levels, and the devices over which they are spread."""

    prefixes: tuple[int, int]
    suffixes: tuple[int, int]
    devices: int
    columns: int

    def shard(self, level: tuple[int, int], row: Array, offset: Array) -> Array:
        """The device of a token of a level."""
        return row // (level[0] // self.devices) * self.columns + offset // (level[1] // self.columns)


class _Actions(NamedTuple):
    """int[actions] each, as in `Packing`, and the device that has their state."""

    row: Array
    column: Array
    state: Array
    shard: Array


def _share(count: int, whole: int) -> int:
    """The least of whole, 1/2, 1/4 ... of it that is `count` or more; twice, four times ... if none is."""
    while whole < count:
        whole *= 2
    while whole % 16 == 0 and whole // 2 >= count:
        whole //= 2
    return whole


def _lines(parents: Array, tiles: _Tiles) -> Array:
    """Where each row of suffixes goes: with several devices, they are dealt to their prefixes in equal numbers."""
    if tiles.devices == 1:
        return np.arange(len(parents))
    each = tiles.suffixes[0] // tiles.prefixes[0]
    siblings_before = np.array([int((parents[:k] == parent).sum()) for k, parent in enumerate(parents)], int)
    return parents * each + siblings_before


def _listed(assigned: Assigned, tiles: _Tiles) -> _Actions:
    row, column, own, packed_row, offset = assigned.actions.T
    moved = np.append(_lines(assigned.parents, tiles), 0)[np.where(own == 1, packed_row, -1)]
    (R0, W0), W1 = tiles.prefixes, tiles.suffixes[1]
    state = np.where(own == 1, R0 * W0 + moved * W1 + offset, packed_row * W0 + offset)
    shard = tiles.shard(tiles.prefixes, packed_row, offset)
    if W1:
        shard = np.where(own == 1, tiles.shard(tiles.suffixes, moved, offset), shard)
    order = np.argsort(shard, kind="stable")
    return _Actions(*(x[order] for x in (row, column, state, shard)))


def _fill(assigned: Assigned, actions: _Actions, tiles: _Tiles, M: int, n: int) -> Packing:
    """The arrays of a packing of these sizes, with M places for actions on each device."""

    def packed_rows(size: tuple[int, int], pieces: list[tuple[int, int, DepthFirst]]) -> PackedRows:
        arrays = DepthFirst(*(np.zeros(size, np.int32) for _ in DepthFirst._fields))
        for row, offset, tokens in pieces:
            for array, values in zip(arrays, tokens, strict=True):
                array[row, offset : offset + len(values)] = values
        return PackedRows(*arrays)

    shards, (R0, W0) = tiles.devices * tiles.columns, tiles.prefixes
    first = np.arange(shards) // tiles.columns * (R0 // tiles.devices) * W0
    first += np.arange(shards) % tiles.columns * (W0 // tiles.columns)  # a state of each device, for no action
    before = np.searchsorted(actions.shard, np.arange(shards))
    place = actions.shard * M + np.arange(len(actions.shard)) - before[actions.shard]

    def placed(values: Array, empty: Array) -> Array:
        out = empty.astype(np.int32)
        out[place] = values
        return out

    at = _lines(assigned.parents, tiles)
    after = [(int(at[r]), o, tokens) for r, o, tokens in assigned.suffixes]
    R1, W1 = tiles.suffixes
    parent = np.append(assigned.parents, np.zeros(max(R1 - len(at), 0), int)).astype(np.int32)
    return Packing(
        prefixes=packed_rows(tiles.prefixes, assigned.prefixes),
        suffixes=packed_rows(tiles.suffixes, after) if W1 else None,
        parent=None if tiles.devices > 1 or not W1 else parent,
        row=placed(actions.row, np.full(shards * M, n)), column=placed(actions.column, np.zeros(shards * M)),
        state=placed(actions.state, np.repeat(first, M)), shards=shards,
    )  # fmt: skip
