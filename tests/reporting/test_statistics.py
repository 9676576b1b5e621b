"""Intervals and pass@k against formulas worked by hand and enumeration."""

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.reporting.statistics import (
    as_number,
    clustered_interval,
    difference_interval,
    paired_difference,
    pass_at_k,
    thin,
    typical_size,
    wilson_interval,
)
from jaxrl_llm.utils.errors import InputError


def test_wilson_of_eight_in_ten():
    # p = 0.8, n = 10, z = 1.959964, z^2 = 3.841459:
    # centre (p + z^2 / 2n) / (1 + z^2 / n) = 0.9920729 / 1.3841459 = 0.7167401
    # half z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)
    #    = 1.959964 sqrt(0.016 + 0.0096036) / 1.3841459 = 1.959964 * 0.1600114 / 1.3841459 = 0.2265776
    low, high = wilson_interval(8, 10)
    assert low == pytest.approx(0.7167401 - 0.2265776, abs=2e-6)
    assert high == pytest.approx(0.7167401 + 0.2265776, abs=2e-6)


@given(st.integers(1, 500), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
@settings(max_examples=50, deadline=None)
def test_wilson_ends_solve_the_score_equation(trials, share, level):
    successes = round(share * trials)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    low, high = wilson_interval(successes, trials, level)
    assert 0 <= low <= successes / trials <= high <= 1
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(successes / trials - end) == pytest.approx(z * math.sqrt(end * (1 - end) / trials), rel=1e-6)


def test_wilson_at_the_edges():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 20)[0] == 0.0
    assert wilson_interval(20, 20)[1] == 1.0
    for arguments in ((3, 2), (-1, 2), (1, 2, 0.0), (1, 2, 95)):
        with pytest.raises(InputError):
            wilson_interval(*arguments)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples):
    for k in range(1, samples + 1):
        expected = []
        for correct in range(samples + 1):
            subsets = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
            expected.append(sum(map(any, subsets)) / len(subsets))
        np.testing.assert_allclose(pass_at_k(np.arange(samples + 1), samples, k), expected, rtol=1e-12, atol=1e-15)


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_digits():
    expected = 1 - math.comb(9_990, 1_000) / math.comb(10_000, 1_000)  # exact integers, one rounding
    result = pass_at_k(np.array([10]), 10_000, 1_000)
    assert result.dtype == np.float64
    assert result[0] == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_of_one_is_the_success_rate_and_no_prompts_give_none():
    np.testing.assert_allclose(pass_at_k([0, 3, 8], 8, 1), [0, 3 / 8, 1])
    assert pass_at_k(np.zeros(0, dtype=int), 4, 2).shape == (0,)


@pytest.mark.parametrize("correct, samples, k", [([1], 4, 0), ([1], 4, 5), ([5], 4, 2), ([-1], 4, 2), ([[1]], 4, 2)])
def test_pass_at_k_refuses_impossible_counts(correct, samples, k):
    with pytest.raises(InputError):
        pass_at_k(correct, samples, k)


@pytest.mark.parametrize("trials", [1, 2, 8])
def test_prompts_that_all_fail_count_once_each(trials):
    """By hand, of 2 prompts and z^2 = 3.841459: the upper end of Wilson's interval is z^2 / (n + z^2) = 0.657620."""
    low, high = clustered_interval([0.0, 0.0], trials)
    assert low == 0.0
    assert high == pytest.approx(3.841459 / 5.841459, abs=1e-6)
    low, high = clustered_interval([1.0, 1.0], trials)
    assert low == pytest.approx(2 / 5.841459, abs=1e-6)
    assert high == 1.0


def test_an_interval_over_prompts_by_hand():
    # values 0.5, 0.5, 0.5, 0.25, and 0 and 1: mean 2.75 / 6 = 0.458333, var 1.8125 / 6 - 0.458333^2 = 0.0920139,
    # r = 0.0920139 / (0.458333 * 0.541667) = 0.370629, so that 4 prompts are worth 10.79245 answers.
    # The rate is 0.4375: centre (0.4375 + 3.841459 / 21.5849) / (1 + 3.841459 / 10.79245) = 0.453906,
    # half 1.959964 sqrt(0.4375 * 0.5625 / 10.79245 + 3.841459 / (4 * 10.79245^2)) / 1.355940 = 0.254695
    low, high = clustered_interval([0.5, 0.5, 0.5, 0.25], trials=8)
    assert low == pytest.approx(0.453906 - 0.254695, abs=1e-5)
    assert high == pytest.approx(0.453906 + 0.254695, abs=1e-5)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from([0.9, 0.95]))
@settings(max_examples=50, deadline=None)
def test_with_one_sample_a_prompt_it_is_the_interval_of_a_count(right, level):
    from scipy import stats

    found = clustered_interval(np.array(right, float), level=level)
    expected = stats.binomtest(sum(right), len(right)).proportion_ci(level, method="wilson")
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found == pytest.approx(wilson_interval(sum(right), len(right), level), abs=1e-12)


@pytest.mark.parametrize(
    "prompts, samples, a, b", [(20, 4, 0.5, 0.5), (20, 8, 0.3, 1.5), (64, 8, 1, 3), (20, 8, 50, 50), (5, 8, 1, 1)]
)
def test_it_holds_the_rate_about_as_often_as_it_says(prompts, samples, a, b):
    """Difficulties from a beta distribution: prompts all alike, very unlike, and few."""
    random, held = np.random.default_rng(prompts + samples), 0
    for _ in range(1000):
        rates = random.binomial(samples, random.beta(a, b, prompts)) / samples
        low, high = clustered_interval(rates, samples)
        held += low <= a / (a + b) <= high
    assert 0.93 < held / 1000 < 0.995


def test_samples_of_prompts_that_are_alike_count_each_and_never_more():
    alike = clustered_interval([0.5] * 64, trials=8)
    assert alike == pytest.approx(wilson_interval(256, 512), abs=1e-12)
    unlike = clustered_interval([0.0, 1.0] * 32, trials=8)
    assert unlike == pytest.approx(wilson_interval(32, 64), abs=1e-12)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [[1.0, 0.5]], [1.5], [-0.1]])
def test_an_interval_over_prompts_refuses_what_is_no_rate(values):
    with pytest.raises(InputError, match="all from 0 to 1"):
        clustered_interval(values)


def test_thin_keeps_short_series_and_skips_what_is_not_finite():
    assert thin([3.0, 1.0], points=5).tolist() == [3.0, 1.0]
    np.testing.assert_array_equal(thin([1, 2, math.nan, math.inf, 5, 9], points=3, how=np.max), [2, math.nan, 9])
    assert thin(np.arange(10_000.0), points=300, how=np.min).shape == (300,)


def test_typical_size_ignores_zeros_and_gaps():
    assert typical_size([0.0, None, math.nan, -4.0, 2.0], percentile=100) == 4.0
    assert typical_size([0.0, None]) == 1.0


def test_differences_are_those_of_newcombe():
    # His examples: 56/70 against 48/80 in 17:873, and the table 36, 12, 2, 0 in 17:2635; in both, 0.2 and method 10.
    difference, low, high = difference_interval((48, 80), (56, 70))
    assert (round(difference, 4), round(low, 4), round(high, 4)) == (0.2, 0.0524, 0.3339)
    difference, low, high, p = paired_difference(right=36, fixed=12, broken=2, wrong=0)
    assert (round(difference, 4), round(low, 4), round(high, 4)) == (0.2, 0.0569, 0.3404)
    # McNemar: 2 or fewer, or 12 or more, of 14 fair coins: 2 (1 + 14 + 91) / 2^14.
    assert p == pytest.approx(2 * 106 / 2**14)


@given(*[st.integers(0, 40)] * 4)
@settings(max_examples=50, deadline=None)
def test_a_paired_difference_is_antisymmetric_and_in_its_interval(right, fixed, broken, wrong):
    if not right + fixed + broken + wrong:
        return
    difference, low, high, p = paired_difference(right, fixed, broken, wrong)
    assert -1 <= low <= difference <= high <= 1
    assert 0 <= p <= 1
    back = paired_difference(right, broken, fixed, wrong)
    assert (-back[0], -back[2], -back[1], back[3]) == pytest.approx((difference, low, high, p))
    if fixed == broken:
        assert p == 1.0


def test_intervals_of_differences_cover_the_truth():
    """Of 300 draws of 60 prompts, the 95 % interval holds the true difference in at least 92 %."""
    rng = np.random.default_rng(0)
    draws = rng.multinomial(60, [0.3, 0.3, 0.1, 0.3], size=300)
    held = [low <= 0.2 <= high for _, low, high, _ in (paired_difference(*map(int, draw)) for draw in draws)]
    assert 0.92 <= np.mean(held) <= 0.99


def test_as_number():
    assert as_number(3) == 3.0
    for value in (None, "3", math.inf, -1e31, math.nan, [1]):
        assert math.isnan(as_number(value))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: wilson_interval(1.5, 3), "successes is 1.5, but must be a whole number"),  # type: ignore[arg-type]
        (lambda: wilson_interval("2", 3), "successes is '2'"),  # type: ignore[arg-type]
        (lambda: wilson_interval(1, 3, level="0.95"), "confidence level '0.95'"),  # type: ignore[arg-type]
        (lambda: pass_at_k([1], 4, 1.5), "k is 1.5"),  # type: ignore[arg-type]
        (lambda: pass_at_k([0.5], 4, 2), "correct holds 0.5: counts are whole numbers"),
        (lambda: pass_at_k(["a"], 4, 2), "correct is .*'a'.*, but must be a list of numbers"),
        (lambda: clustered_interval(["a"]), "values is .*'a'.*, but must be a list of numbers"),
        (lambda: clustered_interval([0.5, 1.0], trials=0), "trials is 0"),
        (lambda: thin([1.0, 2.0], 0), "points is 0"),
        (lambda: thin([[1.0]], 1), "in one dimension"),
        (lambda: typical_size([1.0], percentile=200), "percentile is 200"),
        (lambda: paired_difference(1, 2, -1, 0), "broken is -1"),
        (lambda: paired_difference(1, 2.5, 1, 0), "fixed is 2.5"),  # type: ignore[arg-type]
        (lambda: paired_difference(0, 0, 0, 0), "at least one prompt"),
        (lambda: paired_difference(1, 1, 1, 1, level=1), "confidence level 1"),
        (lambda: difference_interval((1, 2), (0, 0)), "at least one trial on each side"),
        (lambda: difference_interval((3, 2), (1, 2)), "3 successes of 2 trials"),
        (lambda: typical_size(3.0), "values is 3.0, but must be a list"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_is_named(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()
