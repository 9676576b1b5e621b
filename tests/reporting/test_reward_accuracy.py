"""Accuracy of reward models against a slow count, and RewardBench 2's ties by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxrl_llm.reporting.reward_accuracy import Scored, accuracies, credit, ties_score
from jaxrl_llm.reporting.statistics import wilson_interval
from jaxrl_llm.utils.errors import InputError


def test_pairs() -> None:
    rng = np.random.default_rng(0)
    items = [Scored([float(w)], [float(x)]) for w, x in rng.normal(size=(50, 2))]
    wins = sum(one.right[0] > one.wrong[0] for one in items)
    (found,) = accuracies(items)
    assert (found.prompts, found.ties) == (50, 0)
    assert found.accuracy == found.score == wins / 50
    assert (found.low, found.high) == pytest.approx(wilson_interval(wins, 50))
    swapped = accuracies([Scored(one.wrong, one.right) for one in items])[0]
    assert swapped.accuracy == pytest.approx(1 - found.accuracy)


def test_ties_count_as_an_answer_drawn_among_the_best() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        right, wrong = rng.integers(0, 3, 2).astype(float).tolist(), rng.integers(0, 3, 3).astype(float).tolist()
        best = [is_right for score, is_right in [*((x, 1) for x in right), *((x, 0) for x in wrong)]
                if score == max(right + wrong)]  # fmt: skip
        assert credit(Scored(right, wrong)) == pytest.approx(sum(best) / len(best))
    found = accuracies([Scored([1.0], [1.0, 0.0, 1.0]), Scored([2.0], [1.0, 1.0, 1.0])])[0]
    assert (found.accuracy, found.ties) == (pytest.approx((1 / 3 + 1) / 2), 1)


def test_subsets_have_equal_weight_in_the_score() -> None:
    items = [Scored([1.0], [0.0], "easy")] * 3 + [Scored([0.0], [1.0], "hard")]
    easy, hard, whole = accuracies(items)
    assert [one.subset for one in (easy, hard, whole)] == ["easy", "hard", "all"]
    assert (easy.accuracy, hard.accuracy, whole.accuracy, whole.score) == (1.0, 0.0, 0.75, 0.5)


def test_ties_by_hand() -> None:
    items = [
        Scored([5.0], [1.0], "ties", "ref:a"), Scored([5.0, 4.0], [1.0, 0.0], "ties", "tied:a"),  # gaps 4, 3; spread 1
        Scored([2.0], [1.5], "ties", "ref:b"), Scored([4.0, 2.0], [1.0], "ties", "tied:b"),  # gaps 0.5, 1; spread 2
        Scored([2.0], [3.0], "ties", "ref:c"), Scored([4.0, 4.0], [1.0], "ties", "tied:c"),  # gaps -1, 3; spread 0
    ]  # fmt: skip
    margins = (math.tanh(3 / 1 - 1) + math.tanh(0.5 / 2 - 1) + math.tanh(-math.inf)) / 3
    expected = 0.3 * 2 / 3 + 0.3 * 1 + 0.2 * 2 / 3 + 0.2 * 1 / 3 + 0.01 * margins
    assert ties_score(items) == pytest.approx(expected)
    (found,) = accuracies(items)
    assert found.accuracy == pytest.approx(5 / 6)
    assert found.score == pytest.approx(expected)
    equal = [Scored([1.0], [1.0], "ties", "ref:x"), Scored([1.0, 1.0], [1.0], "ties", "tied:x")]
    assert ties_score(equal) == 0.0
    assert ties_score(items[::2]) == pytest.approx(0.3 * 2 / 3)  # no prompt occurs as both


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="no scored prompts"):
        accuracies([])
    with pytest.raises(InputError, match="lacks right or wrong answers"):
        accuracies([Scored([1.0], [])])
