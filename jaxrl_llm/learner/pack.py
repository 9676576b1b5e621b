"""Packing on the host: the tokens of a slice of rows into packed rows of one length (`models.packing`).

What rows share is there once (`families`). Trees and single completions are put side by side, the longest first, each
into the first row that has room. Sizes are of a short list, so that few programs are compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.buckets import bucket
from jaxrl_llm.learner.families import LEAST_SHARED, Array, Family, Rows, Walk, families, grow, subtrees
from jaxrl_llm.models.packing import Level, Packing

SMALL = 512  # places in packed rows that are not worth another program


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


def fewest_places(longest: int, pieces: Callable[[int], Sequence[Pieces]], widths: Sequence[int]) -> tuple[int, int]:
    """Length and number of packed rows for which all slices need the fewest places; longer rows must save a tenth.

    pieces: those of each slice, given the length of rows. widths: to choose from, as multiples of `longest`.
    """
    found = []
    for times in widths:
        width = bucket(times * longest, least=16, per_octave=2)
        made = pieces(width)
        rows = max(bucket(len(first_fit(sizes, width, keys)[2]), 1) for sizes, keys in made)
        # Where there is little to save, there shall be few sizes.
        rows = max(rows, min(SMALL // width, *(len(sizes) for sizes, _ in made)))
        found.append((rows * width * (1.1 if times > 1 else 1), width, rows))
    return min(found)[1:]


def whole_prompts(split: Sequence[Sequence[Family]], groups: int) -> tuple[int, int]:
    """Length and number of the rows for roots."""
    roots = [[family.root for family in part] for part in split]
    longest = max((root for part in roots for root in part), default=1)
    after = max(int(sum(family.lengths.sum() for family in part)) for part in split)
    # A row for each prompt, unless that wastes much: the fewer sizes there are, the fewer programs are compiled.
    width, count = bucket(longest, least=16), max(groups, *map(len, roots))
    if count * width - max(map(sum, roots)) > (count * width + after) / 8:
        return fewest_places(longest, lambda _: [(part, [0] * len(part)) for part in roots], (1, 2, 4))
    return width, count


def _sizes(part: Sequence[Family], root_width: int, width: int) -> Pieces:
    """How many places each subtree of a slice takes, and the row of its root: one more than its tokens for each member.

    So there are as many places as actions, and the one number goes with the other.
    """
    line, _, _ = first_fit([family.root for family in part], root_width)
    found = [
        (int(family.lengths[low:high].sum() - family.shared[low + 1 : high].sum()) + high - low, int(row))
        for family, row in zip(part, line, strict=True)
        if family.lengths.any()
        for low, high in subtrees(family, width)
    ]
    return [size for size, _ in found], [row for _, row in found]


class Placed(NamedTuple):
    """The families of a slice in packed rows. A piece is (packed row, offset, walk)."""

    roots: list[tuple[int, int, Walk]]
    branches: list[tuple[int, int, Walk]]
    root_rows: int
    parents: Array  # int[rows of branches]
    actions: Array  # int[actions, 5]: row, column, level, packed row, place in it


def place(part: Sequence[Family], root_width: int, branch_width: int, columns: int) -> Placed:
    """Put the families of a slice into packed rows."""
    grown, number = [], 1
    for family in part:
        grown.append(grow(family, branch_width, columns, number))
        number = int(grown[-1].root.leave[0])
    line, offset, owners = first_fit([family.root for family in part], root_width)
    roots = [(int(line[i]), int(offset[i]), g.root) for i, g in enumerate(grown)]
    pieces = [(i, j, walk) for i, g in enumerate(grown) if part[i].lengths.any() for j, walk in enumerate(g.subtrees)]
    members = Counter((i, j) for i, g in enumerate(grown) for j, _ in g.places)
    where, shift, parents = first_fit(
        [len(walk.source) + members[i, j] for i, j, walk in pieces], branch_width, [int(line[i]) for i, *_ in pieces]
    )
    branches = [(int(where[k]), int(shift[k]), walk) for k, (*_, walk) in enumerate(pieces)]
    at = {(i, j): (int(where[k]), int(shift[k])) for k, (i, j, _) in enumerate(pieces)}
    actions = [np.zeros((0, 5), int)]
    for i, (family, g) in enumerate(zip(part, grown, strict=True)):
        for member, (j, path) in zip(family.members, g.places, strict=True):
            own = member.depth >= family.root
            row, start = at.get((i, j), (0, 0))
            inside = np.concatenate([np.zeros(family.root, int), path])[member.depth]
            actions.append(np.stack([
                np.full(len(own), member.row), member.action, own, np.where(own, row, line[i]),
                np.where(own, start + inside, offset[i] + member.depth),
            ], axis=1))  # fmt: skip
    return Placed(roots, branches, len(owners), np.array(parents, int), np.concatenate(actions))


def pack(rows: Rows, slices: Sequence[Array], devices: int = 1) -> Packing:
    """A packing of each slice of the batch's rows, stacked along a first axis: int32[len(slices), ...], on the host.

    slices: rows int[n], all of one length; a packing speaks of a row by its place in its slice. devices: over which
    packed rows are to be spread; their numbers are multiples of it, and branches stand with their roots.
    """
    n, L = len(slices[0]), rows.tokens.shape[1]
    split = [families(Rows(*(x[chosen] for x in rows)), np.arange(n)) for chosen in slices]
    W0, R0 = whole_prompts(split, max(len(np.unique(rows.group[chosen])) for chosen in slices))
    trees = any(family.shared.max() >= LEAST_SHARED for part in split for family in part)
    longest = max((int(family.lengths.max()) for part in split for family in part), default=0)
    W1, R1 = 0, 0
    if longest:
        sizes = lambda width: [_sizes(part, W0, width) for part in split]  # noqa: E731
        W1, R1 = fewest_places(longest + 1, sizes, (1, 2, 4) if trees else (1, 2))
    placed = [place(part, W0, W1, L) for part in split]
    R0 = _spread(R0, devices)
    each = bucket(max(int(np.bincount(p.parents, minlength=1).max()) for p in placed), 1)
    if devices > 1:
        R1 = R0 * each
    M = _share(max(len(p.actions) for p in placed), R1 * W1 or R0 * W0)
    packed = [_fill(p, (R0, W0), (R1, W1), M, n, devices > 1) for p in placed]
    return jax.tree.map(lambda *xs: np.stack(xs), *packed)


def _share(count: int, whole: int) -> int:
    """The least of whole, 1/2, 1/4 ... of it that is `count` or more; twice, four times ... if none is."""
    while whole < count:
        whole *= 2
    while whole % 16 == 0 and whole // 2 >= count:
        whole //= 2
    return whole


def _spread(count: int, devices: int) -> int:
    return -(-count // devices) * devices


def _fill(placed: Placed, roots: tuple[int, int], branches: tuple[int, int], M: int, n: int, even: bool) -> Packing:
    """The arrays of a packing of the given sizes. even: branches are dealt to their roots in equal numbers."""

    def level(size: tuple[int, int], pieces: list[tuple[int, int, Walk]]) -> Level:
        arrays = Walk(*(np.zeros(size, np.int32) for _ in Walk._fields))
        for row, offset, walk in pieces:
            for array, values in zip(arrays, walk, strict=True):
                array[row, offset : offset + len(values)] = values
        return Level(*arrays)

    line = np.arange(len(placed.parents))
    if even:
        each = branches[0] // roots[0]
        seen = [int((placed.parents[:k] == p).sum()) for k, p in enumerate(placed.parents)]
        line = placed.parents * each + np.array(seen, int)
    row, column, own, packed_row, at = placed.actions.T
    moved = np.append(line, 0)[np.where(own == 1, packed_row, -1)]
    state = np.where(own == 1, roots[0] * roots[1] + moved * branches[1] + at, packed_row * roots[1] + at)

    def padded(values: Array, length: int, fill: int) -> Array:
        return np.concatenate([values, np.full(length - len(values), fill)]).astype(np.int32)

    return Packing(
        roots=level(roots, placed.roots),
        branches=level(branches, [(int(line[r]), o, w) for r, o, w in placed.branches]) if branches[1] else None,
        parent=None if even or not branches[1] else padded(placed.parents, branches[0], 0),
        row=padded(row, M, n), column=padded(column, M, 0), state=padded(state, M, 0),
    )  # fmt: skip
