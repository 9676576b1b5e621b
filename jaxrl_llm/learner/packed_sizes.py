"""Sizes of packed rows: of a short list, so that few programs are compiled, or of what a whole run may need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.learner.prefix_trie import LEAST_SHARED, Array, PrefixTrie, places, rounded_up, subtrees, up_to

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


class Room(NamedTuple):
    """The lengths of the rows that a run's batches may have: small packed rows are as long in all steps."""

    prompt: int  # most tokens of a prompt
    completion: int  # most tokens after it


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
    split: Sequence[Sequence[PrefixTrie]], groups: int, multiple: int = 1, chunk: int = 1
) -> tuple[int, int]:
    """Length and number of the rows for prefixes. multiple: of which the length must be one; chunk: see `pack`."""
    prefixes = [[rounded_up(trie.prefix, chunk) for trie in part] for part in split]
    longest = max((prefix for part in prefixes for prefix in part), default=1)
    after = max(int(sum(trie.lengths.sum() for trie in part)) for part in split)
    # A row for each prompt, unless that wastes much: the fewer sizes there are, the fewer programs are compiled.
    width, count = rounded_up(bucket(longest, least=16), multiple), max(groups, *map(len, prefixes))
    if count * width - max(map(sum, prefixes)) > (count * width + after) / 8:
        alike = lambda _: [(part, [0] * len(part)) for part in prefixes]  # noqa: E731
        return fewest_places(longest, alike, (1, 2, 4), groups, multiple)
    return width, count


def sizes_of(part: Sequence[PrefixTrie], prefix_width: int, width: int, chunk: int) -> Pieces:
    """How many places each subtree of a slice takes, and its row of prefixes."""
    rows, _, _ = first_fit([rounded_up(trie.prefix, chunk) for trie in part], prefix_width)
    found = [
        (places(trie, low, high, chunk), int(row))
        for trie, row in zip(part, rows, strict=True)
        if trie.lengths.any()
        for low, high in subtrees(trie, width, chunk)
    ]
    return [size for size, _ in found], [row for _, row in found]


def fitting_sizes(
    split: Sequence[Sequence[PrefixTrie]], rows: int, groups: int, multiple: int, chunk: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes (rows, length) of both levels for these tries; (0, 0) where there are no suffixes. rows: of a slice."""
    W0, R0 = size_of_prefixes(split, groups, multiple, chunk)
    trees = any(trie.shared.max() >= LEAST_SHARED for part in split for trie in part)
    longest = max((int(trie.lengths.max()) for part in split for trie in part), default=0)
    if not longest:
        return (R0, W0), (0, 0)
    sizes = lambda width: [sizes_of(part, W0, width, chunk) for part in split]  # noqa: E731
    W1, R1 = fewest_places(longest + 1, sizes, (1, 2, 4) if trees else (1, 2), rows, multiple)
    return (R0, W0), (R1, W1)


def fixed_sizes(
    split: Sequence[Sequence[PrefixTrie]], rows: int, groups: int, room: Room, multiple: int, chunk: int
) -> tuple[list[list[PrefixTrie]], tuple[int, int], tuple[int, int]] | None:
    """The tries, whose prefixes end with the prompts, and sizes (rows, length) of both levels that only `room` decides.

    With them every batch of a run has one program. None where they are not small, or the tries do not fit.
    """
    prompt = rounded_up(bucket(room.prompt, least=16), multiple)
    suffix = rounded_up(bucket(room.completion, least=16, per_octave=2), multiple)
    if max(groups * prompt, rows * suffix) > SMALL or any(len(part) > groups for part in split):
        return None
    cut = [[up_to(trie, prompt) for trie in part] for part in split]
    for part in cut:
        sizes, keys = sizes_of(part, prompt, suffix, chunk)
        if max(sizes, default=0) > suffix or len(first_fit(sizes, suffix, keys)[2]) > rows:
            return None
    return cut, (groups, prompt), (rows, suffix)
