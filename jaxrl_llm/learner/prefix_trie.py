"""Prefix tries of the rows of a batch: what they share, such as the prompt of a group, is found by comparing tokens.

A group's rows are sorted as sequences of tokens. What all of them begin with is the trie's prefix; where neighbours
share more, its subtrees branch deeper. Tokens are numbered in depth-first order (`models.packing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 8  # tokens that a completion must share with another for both to be kept in one subtree
Array = np.ndarray


class TokenRows(NamedTuple):
    """What the packing of a whole batch depends on, on the host."""

    tokens: Array  # int32[N, L]
    token_mask: Array  # bool[N, L]
    action_mask: Array  # bool[N, L]
    group: Array  # int32[N]
    thoughts: Array | None = None  # f32[N, L, 3, K], soft tokens, which rows share only where all of them is equal

    def of(self, chosen: Array) -> TokenRows:
        """Some of the rows."""
        return TokenRows(*(None if x is None else x[chosen] for x in self))  # type: ignore[arg-type]

    def spelled(self, row: int, path: Array) -> Array:
        """uint32[n] or [n, words]: what the model sees of a row's tokens, equal where these are."""
        tokens = self.tokens[row, path].astype(">u4")
        if self.thoughts is None:
            return tokens
        own = np.ascontiguousarray(self.thoughts[row, path], ">f4").reshape(len(path), -1)
        return np.concatenate([tokens[:, None], own.view(">u4")], axis=1)


class DepthFirst(NamedTuple):
    """Tokens of a trie, or of a part of one, in depth-first order; int[n] each, as in `models.packing.PackedRows`."""

    source: Array
    enter: Array
    leave: Array
    position: Array


class Member(NamedTuple):
    """A row that has actions: a path of its trie."""

    row: int
    path: Array  # columns of its tokens before the last action: what the model must see
    action: Array  # columns of its actions
    depth: Array  # for each action, which token of the path it was chosen from


class PrefixTrie(NamedTuple):
    """Rows that begin with the same tokens, in the order of their tokens."""

    members: list[Member]
    prefix: int  # tokens that all share
    shared: Array  # int[members]: tokens after the prefix that each shares with the one before

    @property
    def lengths(self) -> Array:
        """int[members]: tokens after the prefix."""
        return np.array([len(member.path) for member in self.members]) - self.prefix


def prefix_tries(rows: TokenRows, chosen: Array) -> list[PrefixTrie]:
    """The tries of some rows: one for each group, or for each row of a group whose rows share nothing."""
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
    out: list[PrefixTrie] = []
    for group in members.values():
        # As big-endian bytes, sequences of tokens are in the order of their bytes.
        spelled = {m.row: rows.spelled(m.row, m.path) for m in group}
        group = sorted(group, key=lambda m: spelled[m.row].tobytes())
        common = [0] + [_common(spelled[a.row], spelled[b.row]) for a, b in pairwise(group)]
        # The first and the last in order share what all share.
        prefix = _common(spelled[group[0].row], spelled[group[-1].row])
        if prefix:
            out.append(PrefixTrie(group, prefix, np.maximum(np.array(common) - prefix, 0)))
        else:
            out += [PrefixTrie([member], len(member.path), np.zeros(1, int)) for member in group]
    return out


def _common(a: Array, b: Array) -> int:
    """The length of the longest common prefix of two sequences."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).reshape(n, -1).any(axis=1)
    return int(different.argmax()) if different.any() else n


def subtrees(trie: PrefixTrie, width: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of members whose tokens after the prefix fit into `width` each; cut where members share the fewest.

    multiple: see `number_tokens`.
    """
    shared = trie.shared
    open_ranges = [(0, len(shared))]
    while open_ranges:
        low, high = open_ranges.pop()
        inner = shared[low + 1 : high]
        if high - low == 1 or (inner.min() >= LEAST_SHARED and places(trie, low, high, multiple) <= width):
            yield low, high
        else:
            at = low + 1 + int(inner.argmin())
            open_ranges += [(at, high), (low, at)]


def places(trie: PrefixTrie, low: int, high: int, multiple: int = 1) -> int:
    """How many places a subtree takes: one more than its tokens for each member, so that each action has one.

    multiple: see `number_tokens`.
    """
    tokens = int(trie.lengths[low:high].sum() - trie.shared[low + 1 : high].sum())
    end = tokens
    if multiple > 1 and tokens:
        end = int(_aligned(depth_first(trie, low, high)[1], tokens, multiple)[-1]) + 1
    return rounded_up(max(end, tokens + high - low), multiple)


def depth_first(trie: PrefixTrie, low: int, high: int) -> tuple[list[Array], Array]:
    """Tokens of a subtree in depth-first order: for each member the indices of its path, and where runs begin.

    A run is a part of a path that nothing branches from but at its end (`models.packing.Paths`).
    """
    paths: list[Array] = []
    path, size, starts = np.zeros(0, int), 0, {0}
    for index in range(low, high):
        keep, length = int(trie.shared[index]) if index > low else 0, int(trie.lengths[index])
        if keep < len(path):
            starts |= {int(path[keep]), size}
        path = np.concatenate([path[:keep], np.arange(size, size + length - keep)])
        size += length - keep
        paths.append(path)
    return paths, np.array(sorted(starts))


def rounded_up(count: int, multiple: int) -> int:
    """The least multiple that is `count` or more."""
    return -(-count // multiple) * multiple


class NumberedTrie(NamedTuple):
    """A trie whose tokens have numbers: its prefix, its subtrees, and where each member's path is in them."""

    prefix: DepthFirst
    subtrees: list[DepthFirst]
    paths: list[tuple[int, Array]]  # for each member its subtree, and the indices in it of the path after the prefix


def number_tokens(trie: PrefixTrie, width: int, columns: int, number: int, multiple: int = 1) -> NumberedTrie:
    """Number the tokens of a trie from `number` on. columns: L of the batch; width: of a row of suffixes.

    multiple: of places, with which each run begins; what is between stays empty, as are the last places of a subtree.
    """

    def source(member: Member) -> Array:
        return member.row * columns + member.path

    parts: list[DepthFirst] = []
    paths: list[tuple[int, Array]] = []
    first = number + trie.prefix
    for low, high in subtrees(trie, width, multiple):
        each, starts = depth_first(trie, low, high)
        size = int(trie.lengths[low:high].sum() - trie.shared[low + 1 : high].sum())
        sources, positions, leave, before = [], [], np.zeros(size, int), np.zeros(0, int)
        done = 0
        for index, path in zip(range(low, high), each, strict=True):
            keep = int(trie.shared[index]) if index > low else 0
            leave[before[keep:]] = first + done
            sources.append(source(trie.members[index])[trie.prefix + keep :])
            positions.append(trie.prefix + keep + np.arange(len(path) - keep))
            done, before = done + len(path) - keep, path
        leave[before] = first + size
        tokens = np.concatenate(sources), first + np.arange(size), leave, np.concatenate(positions)
        at = _aligned(starts, size, multiple)
        room = places(trie, low, high, multiple)
        placed = DepthFirst(*(np.zeros(room, int) for _ in tokens))
        for array, values in zip(placed, tokens, strict=True):
            array[at] = values
        paths += [(len(parts), at[path]) for path in each]
        parts.append(placed)
        first += size
    at = np.arange(trie.prefix)
    prefix = DepthFirst(source(trie.members[0])[: trie.prefix], number + at, np.full(trie.prefix, first), at)
    return NumberedTrie(prefix, parts, paths)


def _aligned(starts: Array, size: int, multiple: int) -> Array:
    """The place of each of `size` tokens, where runs that begin with some of them begin at multiples."""
    lengths = np.diff([*starts, size])
    padded = -(-lengths // multiple) * multiple
    aligned = np.cumsum([0, *padded[:-1]])  # where the runs begin
    return np.arange(size) + np.repeat(aligned - starts, lengths)
