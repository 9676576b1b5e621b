"""Verdicts of pairs in both orders: win rates, and how much of them is the position's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


def mean_verdict(verdicts: Sequence[float | None]) -> float:
    """The mean of those that are stated; NaN if none is."""
    known = [one for one in verdicts if one is not None]
    return sum(known) / len(known) if known else float("nan")


class PairVerdicts(NamedTuple):
    """Of P pairs (i, j): how often the response that is shown first wins, f64[P] from 0 to 1, NaN without a verdict."""

    forward: Array  # i is shown first
    swapped: Array  # j is shown first

    @property
    def wins(self) -> Array:
        """f64[P]: the probability that i beats j, (forward + 1 - swapped) / 2, in which a bonus of a place cancels.

        NaN unless both orders have a verdict.
        """
        return np.asarray((self.forward + 1 - self.swapped) / 2)

    @property
    def position_bias(self) -> float:
        """How much more often the response that is shown first wins than the other, -1 to 1; NaN without verdicts.

        Over pairs with verdicts in both orders, so that it is 0 for a judge that reads nothing but the responses.
        """
        both = self.forward + self.swapped - 1
        known = both[~np.isnan(both)]
        return float(known.mean()) if known.size else float("nan")

    @property
    def consistent(self) -> float:
        """Share of pairs whose verdict is the same in both orders; NaN without verdicts."""
        known = ~np.isnan(self.forward + self.swapped)
        same = np.sign(self.forward - 0.5) == -np.sign(self.swapped - 0.5)
        return float(same[known].mean()) if known.any() else float("nan")


def win_matrix(size: int, pairs: Sequence[tuple[int, int]], wins: Array) -> Array:
    """P f64[size, size]: P[i, j] is the probability that i beats j; 1/2 with itself, NaN where nothing is known."""
    matrix = np.full((size, size), np.nan)
    np.fill_diagonal(matrix, 0.5)
    for (i, j), win in zip(pairs, wins, strict=True):
        matrix[i, j], matrix[j, i] = win, 1 - win
    return matrix


def win_rates(matrix: Array) -> Array:
    """f64[n]: the mean of each row's known entries but its own (SPO, 2401.04056); NaN where there is none.

    >>> win_rates(np.array([[0.5, 0.9, 0.2], [0.1, 0.5, 0.6], [0.8, 0.4, 0.5]])).round(2).tolist()
    [0.55, 0.35, 0.6]
    """
    others = ~np.isnan(matrix) & ~np.eye(len(matrix), dtype=bool)
    total = np.where(others, matrix, 0.0).sum(1)
    return np.where(others.any(1), total / np.maximum(others.sum(1), 1), np.nan)
