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
        spelled = {m.row: rows.tokens[m.row, m.path].astype(">u4") for m in group}
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
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def subtrees(trie: PrefixTrie, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of members whose tokens after the prefix fit into `width` each; cut where members share the fewest."""
    lengths, shared = trie.lengths, trie.shared
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


class NumberedTrie(NamedTuple):
    """A trie whose tokens have numbers: its prefix, its subtrees, and where each member's path is in them."""

    prefix: DepthFirst
    subtrees: list[DepthFirst]
    paths: list[tuple[int, Array]]  # for each member its subtree, and the indices in it of the path after the prefix


def number_tokens(trie: PrefixTrie, width: int, columns: int, number: int) -> NumberedTrie:
    """Number the tokens of a trie from `number` on. columns: L of the batch; width: of a row of suffixes."""

    def source(member: Member) -> Array:
        return member.row * columns + member.path

    parts: list[DepthFirst] = []
    paths: list[tuple[int, Array]] = []
    first = number + trie.prefix
    for low, high in subtrees(trie, width):
        sources, positions, path, size = [], [], np.zeros(0, int), 0
        leave = np.zeros(int(trie.lengths[low:high].sum()), int)
        for index in range(low, high):
            keep = int(trie.shared[index]) if index > low else 0
            leave[path[keep:]] = first + size
            new = source(trie.members[index])[trie.prefix + keep :]
            path = np.concatenate([path[:keep], np.arange(size, size + len(new))])
            sources.append(new)
            positions.append(trie.prefix + keep + np.arange(len(new)))
            size += len(new)
            paths.append((len(parts), path))
        leave[path] = first + size
        enter = first + np.arange(size)
        parts.append(DepthFirst(np.concatenate(sources), enter, leave[:size], np.concatenate(positions)))
        first += size
    at = np.arange(trie.prefix)
    prefix = DepthFirst(source(trie.members[0])[: trie.prefix], number + at, np.full(trie.prefix, first), at)
    return NumberedTrie(prefix, parts, paths)
