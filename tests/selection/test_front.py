"""Pareto fronts against loops over all pairs, inclusion and exclusion, and integrals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.selection.front import (
    crowding_distances,
    expected_utility,
    hypervolume,
    non_dominated,
    sparsest,
    sparsity,
)
from jaxrl_llm.utils.errors import InputError

GRID = st.integers(0, 4).map(lambda x: x / 4)
POINTS = st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(GRID, min_size=n, max_size=n), min_size=1, max_size=6))


def dominates(a: Any, b: Any) -> bool:
    return all(x >= y for x, y in zip(a, b, strict=True)) and any(x > y for x, y in zip(a, b, strict=True))


@given(POINTS)
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_the_front_and_its_volume_are_those_of_slow_ones(points: list[list[float]]) -> None:
    front = [i for i, a in enumerate(points) if not any(dominates(b, a) for b in points) and a not in points[:i]]
    assert non_dominated(points).tolist() == front
    volume = 0.0  # of a union of boxes, by inclusion and exclusion
    for size in range(1, len(points) + 1):
        for some in itertools.combinations(points, size):
            volume -= (-1) ** size * float(np.prod(np.min(some, axis=0)))
    assert hypervolume(points) == pytest.approx(volume, abs=1e-9)
    assert hypervolume([points[i] for i in front]) == pytest.approx(volume, abs=1e-9)


def test_distances_are_those_of_the_neighbours() -> None:
    """By a loop, of a front in random order whose values all differ."""
    random = np.random.default_rng(0)
    first = np.sort(random.uniform(0, 3, 7))
    points = np.stack([first, np.sort(random.uniform(0, 1, 7))[::-1], random.permutation(7) * 0.1], axis=1)[
        random.permutation(7)
    ]
    found = crowding_distances(points)
    for i, point in enumerate(points):
        total = 0.0
        for k, value in enumerate(point):
            below, above = ([x for x in points[:, k] if c(x, value)] for c in (lambda x, v: x < v, lambda x, v: x > v))
            total += (min(above) - max(below)) / np.ptp(points[:, k]) if above and below else np.inf
        assert found[i] == pytest.approx(total)


def test_what_is_extended_is_on_the_front_and_far_from_others() -> None:
    points = [[0.0, 1], [0.1, 0.9], [0.2, 0.8], [0.7, 0.6], [1.0, 0], [0.6, 0.6]]
    assert sparsest(points, 3) == [0, 4, 3], "the ends, and then the lonely one; not the dominated one"
    assert sparsest(points, 9) == [0, 4, 3, 2, 1]


def test_sparsity_and_utility() -> None:
    assert sparsity([[0, 3], [1, 1], [3, 0], [0, 0]]) == pytest.approx((1 + 4 + 4 + 1) / 2)
    assert sparsity([[1, 2]]) == 0.0
    w = (np.arange(100_000) + 0.5) / 100_000
    points = [[1.0, 0.0], [0.7, 0.6], [0.0, 1.2]]
    exact = np.max([a * w + b * (1 - w) for a, b in points], axis=0).mean()
    assert expected_utility(points, 200_000) == pytest.approx(exact, abs=3e-3)
    with pytest.raises(InputError, match="finite numbers"):
        hypervolume([[1.0, np.nan]])
    with pytest.raises(InputError, match="points are a list of lists"):
        non_dominated([1.0, 2.0])
