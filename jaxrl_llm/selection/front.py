"""Pareto fronts of points whose coordinates are objectives to maximise: which points are on it, and how good it is.

Points are f64[m, n], a row for each; NumPy functions.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_llm.core.annotations import check_number
from jaxrl_llm.utils.errors import InputError, shown

Points = npt.NDArray[np.float64]


def points_of(values: Any) -> Points:
    """The points as f64[m, n]. InputError for other shapes, and for numbers that are not finite."""
    found = np.asarray(values, np.float64)
    if found.ndim != 2 or not np.isfinite(found).all():
        raise InputError(
            f"points are a list of lists of finite numbers, one for each objective, unlike {shown(values)}"
        )
    return found


def non_dominated(points: Any) -> npt.NDArray[np.int64]:
    """The indices of the points that no other dominates, ascending; of equal points the first alone.

    A point dominates another if it is at least as good in every objective, and better in one.

    >>> non_dominated([[1, 0], [0, 1], [0.5, 0.4], [0.4, 0.4], [1, 0]]).tolist()
    [0, 1, 2]
    """
    x = points_of(points)
    as_good = (x[:, None] >= x[None]).all(axis=2)  # [i, j]: i is at least as good as j everywhere
    better = as_good & ~as_good.T
    earlier = (as_good & as_good.T) & (np.arange(len(x))[:, None] < np.arange(len(x))[None])
    return np.flatnonzero(~(better | earlier).any(axis=0))


def crowding_distances(points: Any) -> Points:
    """How far the neighbours of each point are apart, f64[m]: the larger, the sparser the front is there (NSGA-II).

    The sum over objectives of the distance between the next lower and the next higher point, as a share of the range;
    infinite for the lowest and the highest point of an objective.

    >>> crowding_distances([[0, 1], [0.2, 0.7], [1, 0]]).tolist()
    [inf, 2.0, inf]
    """
    x = points_of(points)
    out = np.zeros(len(x))
    for values in x.T:
        order = np.argsort(values, kind="stable")
        span = values[order[-1]] - values[order[0]] if len(x) else 0.0
        out[order[:1]], out[order[-1:]] = np.inf, np.inf
        if span > 0:
            out[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / span
    return out


def sparsest(points: Any, count: int) -> list[int]:
    """The indices of at most `count` points of the front, those with the largest crowding distances among it first."""
    check_number("sparsest: count", count, least=1, whole=True)
    front = non_dominated(points)
    distances = crowding_distances(points_of(points)[front])
    return [int(front[i]) for i in np.argsort(-distances, kind="stable")[:count]]


def hypervolume(points: Any, reference: Any = 0.0) -> float:
    """The volume of what the points dominate and that is above a reference point (a number for all objectives).

    >>> hypervolume([[2, 1], [1, 2]])
    3.0
    """
    x = np.maximum(points_of(points) - np.asarray(reference, np.float64), 0.0)
    return _volume(x[(x > 0).all(axis=1)])


def _volume(x: Points) -> float:
    """By slices along the last objective, from its highest value down."""
    if not len(x):
        return 0.0
    if x.shape[1] == 1:
        return float(x.max())
    total, levels = 0.0, np.append(np.unique(x[:, -1])[::-1], 0.0)
    for high, low in pairwise(levels.tolist()):
        above = x[x[:, -1] >= high, :-1]
        total += (high - low) * _volume(above[non_dominated(above)])
    return total


def sparsity(points: Any) -> float:
    """Mean over the gaps of the front of sum over objectives of (distance of neighbours)^2; 0 for a single point.

    >>> sparsity([[0, 1], [0.5, 0.5], [1, 0]])
    0.5
    """
    x = points_of(points)
    x = np.sort(x[non_dominated(x)], axis=0)
    return float((np.diff(x, axis=0) ** 2).sum() / max(len(x) - 1, 1))


def expected_utility(points: Any, draws: int = 1000, seed: int = 0) -> float:
    """Mean over weights, drawn uniformly from those that add up to 1, of the best weighted sum of a point's objectives.

    >>> round(expected_utility([[1, 0], [0, 1]], 100_000), 2)
    0.75
    """
    x = points_of(points)
    weights = np.random.default_rng(seed).dirichlet(np.ones(x.shape[1]), draws)
    return float((weights @ x.T).max(axis=1).mean())
