"""Statistics of the laboratory against numbers worked out by hand, and against scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.in_jax.lab.statistics import (
    area,
    bootstrap,
    collapsed,
    interquartile_mean,
    mean,
    probability_of_improvement,
    steps_to,
    trailing_mean,
)
from jaxrl_llm.utils.errors import InputError


def test_the_middle_half_of_all_runs() -> None:
    # 0 1 | 2 3 4 5 | 6 9: floor(8 / 4) = 2 at either end are left out, whichever task they are of.
    assert float(interquartile_mean([np.array([9.0, 0.0, 3.0, 4.0]), np.array([6.0, 1.0, 2.0, 5.0])])) == 3.5
    # Of five runs one at either end.
    assert float(interquartile_mean([np.array([10.0, 1.0, 2.0, 3.0, -7.0])])) == 2.0
    runs = np.random.default_rng(0).normal(size=23)
    assert float(interquartile_mean([runs])) == pytest.approx(stats.trim_mean(runs, 0.25))


def test_improvement_by_counting_pairs() -> None:
    # First task: (3 > 1), (3 > 2), (2 > 1), (2 = 2): 3.5 of 4. Second: (0 < 5), (6 > 5): 1 of 2. Mean: 0.6875.
    x, y = [np.array([3.0, 2.0]), np.array([0.0, 6.0])], [np.array([1.0, 2.0]), np.array([5.0])]
    assert float(probability_of_improvement(x, y)) == 0.6875
    assert float(probability_of_improvement(y, x)) == 1 - 0.6875
    assert float(probability_of_improvement(x, x)) == 0.5
    random = np.random.default_rng(1)
    a, b = random.integers(0, 6, 9).astype(float), random.integers(0, 6, 7).astype(float)
    expected = stats.mannwhitneyu(a, b).statistic / (9 * 7)
    assert float(probability_of_improvement([a], [b])) == pytest.approx(expected)
    with pytest.raises(InputError, match="2 tasks are compared with 1"):
        probability_of_improvement(x, y[:1])


def test_the_bootstrap_of_two_runs_is_known_exactly() -> None:
    """Means of resamples of (0, 1) are 0, 1/2 and 1 with probabilities 1/4, 1/2 and 1/4."""
    runs = [np.array([0.0, 1.0])]
    assert bootstrap(mean, runs, level=0.9) == (0.0, 1.0)
    assert bootstrap(mean, runs, level=0.4) == (0.5, 0.5)


def test_the_bootstrap_draws_within_each_stratum() -> None:
    """Over all 3^2 x 2^2 resamples of two tasks, each of which keeps its number of runs."""
    first, second = np.array([0.0, 1.0]), np.array([10.0, 20.0, 60.0])
    means = [np.mean([*a, *b]) for a in itertools.product(first, repeat=2) for b in itertools.product(second, repeat=3)]
    low, high = bootstrap(mean, [first, second], level=0.8, resamples=20_000)
    assert low == pytest.approx(np.quantile(means, 0.1), abs=0.3)
    assert high == pytest.approx(np.quantile(means, 0.9), abs=0.3)
    # Without strata a resample could hold runs of one task only, and means below 2.
    assert bootstrap(lambda strata: mean(strata).min(keepdims=True), [first, second])[0] >= 6.0


def test_an_interval_is_as_wide_as_it_should_be() -> None:
    runs = np.random.default_rng(2).normal(size=400)
    low, high = bootstrap(mean, [runs])
    assert (high - low) / 2 == pytest.approx(1.96 * runs.std() / 20, rel=0.05)
    assert bootstrap(mean, [runs], seed=3) == bootstrap(mean, [runs], seed=3)


def test_both_samples_of_a_comparison_are_drawn() -> None:
    x, y = [np.array([0.0, 2.0])], [np.array([1.0])]
    low, high = bootstrap(probability_of_improvement, x, y)
    assert (low, high) == (0.0, 1.0)  # drawn are (0, 0), (0, 2), (2, 0) and (2, 2)
    assert bootstrap(probability_of_improvement, y, x) == (0.0, 1.0)


@pytest.mark.parametrize("runs", [np.array([]), np.array([1.0, np.nan]), np.array([[1.0]])])
def test_runs_without_numbers_are_refused(runs: np.ndarray) -> None:
    with pytest.raises(InputError, match="at least one number"):
        bootstrap(mean, [runs])


def test_measures_of_a_curve() -> None:
    curve = np.array([0.0, 0.2, 0.6, 1.0, 0.4])
    np.testing.assert_allclose(trailing_mean(curve, 2), [0.1, 0.4, 0.8, 0.7])
    assert area(curve) == pytest.approx((0.0 / 2 + 0.2 + 0.6 + 1.0 + 0.4 / 2) / 4)
    assert area(curve[:1]) == 0.0
    assert steps_to(curve, 0.5, window=1) == 3
    assert steps_to(curve, 0.5, window=2) == 4  # the mean of the third and the fourth is the first above
    assert steps_to(curve, 0.9, window=2) == math.inf
    assert not collapsed(curve, window=2)  # 0.7 of at best 0.8
    assert collapsed(curve, window=1)  # 0.4 of at best 1
    assert collapsed(np.array([0.5, np.nan]), window=1)
    assert not collapsed(np.zeros(3), window=1)
    with pytest.raises(InputError, match="window"):
        steps_to(curve, 0.5, window=6)
