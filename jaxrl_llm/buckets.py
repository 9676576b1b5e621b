"""Bucketed shapes, so that few programs are compiled."""

from __future__ import annotations

import numpy as np


def bucket(length: int, least: int = 8, per_octave: int = 4) -> int:
    """The smallest bucket that holds `length`.

    There are `per_octave` buckets from each power of two to the next, starting at `least`; with 4, above `least`, at
    most a fifth of a bucket is padding.

    >>> [bucket(n) for n in (1, 9, 17, 33, 65, 1000)]
    [8, 10, 20, 40, 80, 1024]
    >>> [bucket(n, per_octave=2) for n in (9, 13, 17, 33)]
    [12, 16, 24, 48]
    """
    size = least
    while size < length:
        octave = 1 << (size.bit_length() - 1)
        size += max(octave // per_octave, 1)
    return size


def pad_rows(rows: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[N, length] right-padded with zeros, and bool[N, length] true on what is not padding."""
    tokens, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return tokens, mask
