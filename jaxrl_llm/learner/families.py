"""What rows of a batch share: the prompt of a group, and inner parts of trees, found by comparing their tokens.

A group's rows are sorted as sequences of tokens. What all begin with is their root; where neighbours share more, they
make a tree, whose tokens are numbered in the order of a walk through it (`models.packing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 8  # tokens that a completion must share with another for both to be kept in one tree
Array = np.ndarray


class Rows(NamedTuple):
    """What the packing depends on, of a whole batch, on the host."""

    tokens: Array  # int32[N, L]
    token_mask: Array  # bool[N, L]
    action_mask: Array  # bool[N, L]
    group: Array  # int32[N]


class Walk(NamedTuple):
    """Tokens in the order of a walk through their tree, int[n] each."""

    source: Array
    enter: Array
    leave: Array
    position: Array


class Member(NamedTuple):
    """A row that has actions."""

    row: int
    path: Array  # columns of its tokens before the last action: what the model must see
    action: Array  # columns of its actions
    depth: Array  # for each action, which token of the path it was chosen from


class Family(NamedTuple):
    """Rows that begin with the same tokens, in the order of their tokens."""

    members: list[Member]
    root: int  # tokens that all share
    shared: Array  # int[members]: tokens after the root that each shares with the one before

    @property
    def lengths(self) -> Array:
        """int[members]: tokens after the root."""
        return np.array([len(member.path) for member in self.members]) - self.root


def families(rows: Rows, chosen: Array) -> list[Family]:
    """The families among some rows: those of a group, or single rows where a group shares nothing."""
    members: dict[int, list[Member]] = {}
    for row in chosen:
        action = np.flatnonzero(rows.action_mask[row])
        if len(action):
            real = np.flatnonzero(rows.token_mask[row])
            depth = np.searchsorted(real, action) - 1
            # Nothing comes before a row's first token, so it cannot have been chosen.
            action, depth = action[depth >= 0], depth[depth >= 0]
            if len(action):
                member = Member(int(row), real[: depth[-1] + 1], action, depth)
                members.setdefault(int(rows.group[row]), []).append(member)
    out: list[Family] = []
    for group in members.values():
        # As big-endian bytes, sequences of tokens are in the order of their bytes.
        spelled = {m.row: rows.tokens[m.row, m.path].astype(">u4") for m in group}
        group = sorted(group, key=lambda m: spelled[m.row].tobytes())
        common = [0] + [_common(spelled[a.row], spelled[b.row]) for a, b in pairwise(group)]
        # The first and the last in order share what all share.
        root = _common(spelled[group[0].row], spelled[group[-1].row])
        if root:
            out.append(Family(group, root, np.maximum(np.array(common) - root, 0)))
        else:
            out += [Family([member], len(member.path), np.zeros(1, int)) for member in group]
    return out


def _common(a: Array, b: Array) -> int:
    """How many elements two sequences begin with alike."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def subtrees(family: Family, width: int) -> Iterator[tuple[int, int]]:
    """The members, cut into ranges that fit into `width` tokens each, as few shared tokens as possible apart."""
    lengths, shared = family.lengths, family.shared
    open_ranges = [(0, len(lengths))]
    while open_ranges:
        low, high = open_ranges.pop()
        inner = shared[low + 1 : high]
        size = lengths[low:high].sum() - inner.sum() + high - low
        if high - low == 1 or (size <= width and inner.min() >= LEAST_SHARED):
            yield low, high
        else:
            at = low + 1 + int(inner.argmin())
            open_ranges += [(at, high), (low, at)]


class Grown(NamedTuple):
    """A family laid out: its root, its subtrees, and where each member's path lies."""

    root: Walk
    subtrees: list[Walk]
    places: list[tuple[int, Array]]  # for each member its subtree, and the places in it of the path after the root


def grow(family: Family, width: int, columns: int, number: int) -> Grown:
    """Number the tokens of a family from `number` on. columns: L of the batch; width: of a row of branches."""

    def source(member: Member) -> Array:
        return member.row * columns + member.path

    walks: list[Walk] = []
    places: list[tuple[int, Array]] = []
    first = number + family.root
    for low, high in subtrees(family, width):
        sources, positions, path, size = [], [], np.zeros(0, int), 0
        leave = np.zeros(int(family.lengths[low:high].sum()), int)
        for index in range(low, high):
            keep = int(family.shared[index]) if index > low else 0
            leave[path[keep:]] = first + size
            new = source(family.members[index])[family.root + keep :]
            path = np.concatenate([path[:keep], np.arange(size, size + len(new))])
            sources.append(new)
            positions.append(family.root + keep + np.arange(len(new)))
            size += len(new)
            places.append((len(walks), path))
        leave[path] = first + size
        walks.append(Walk(np.concatenate(sources), first + np.arange(size), leave[:size], np.concatenate(positions)))
        first += size
    at = np.arange(family.root)
    root = Walk(source(family.members[0])[: family.root], number + at, np.full(family.root, first), at)
    return Grown(root, walks, places)
