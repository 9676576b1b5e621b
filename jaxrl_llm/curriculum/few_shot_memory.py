"""A curriculum with a pool of solved problems, which shows each prompt those that are most like it."""

from __future__ import annotations

import numpy as np


def nearest(query: np.ndarray, features: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` rows of features f32[n, D] with the largest product with query f32[D], the largest first.

    Of equal ones the later row comes first.
    """
    order = np.lexsort((-np.arange(len(features)), -(features @ query)))
    return [int(i) for i in order[:count]]
