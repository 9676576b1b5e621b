"""Accuracy of reward models against a slow count, and RewardBench 2's ties by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxrl_llm.reporting.reward_accuracy import Rated, accuracies, credit, ties_score
from jaxrl_llm.reporting.statistics import wilson_interval
from jaxrl_llm.utils.errors import InputError


def test_pairs() -> None:
    rng = np.random.default_rng(0)
    items = [Rated([float(w)], [float(x)]) for w, x in rng.normal(size=(50, 2))]
    wins = sum(one.right[0] > one.wrong[0] for one in items)
    (found,) = accuracies(items)
    assert (found.prompts, found.ties) == (50, 0)
    assert found.accuracy == found.score == wins / 50
    assert (found.low, found.high) == pytest.approx(wilson_interval(wins, 50))
    swapped = accuracies([Rated(one.wrong, one.right) for one in items])[0]
    assert swapped.accuracy == pytest.approx(1 - found.accuracy)


def test_ties_count_as_an_answer_drawn_among_the_best() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        right, wrong = rng.integers(0, 3, 2).astype(float).tolist(), rng.integers(0, 3, 3).astype(float).tolist()
        best = [is_right for score, is_right in [*((x, 1) for x in right), *((x, 0) for x in wrong)]
                if score == max(right + wrong)]  # fmt: skip
        assert credit(Rated(right, wrong)) == pytest.approx(sum(best) / len(best))
    found = accuracies([Rated([1.0], [1.0, 0.0, 1.0]), Rated([2.0], [1.0, 1.0, 1.0])])[0]
    assert (found.accuracy, found.ties) == (pytest.approx((1 / 3 + 1) / 2), 1)


def test_subsets_have_equal_weight_in_the_score() -> None:
    items = [Rated([1.0], [0.0], "easy")] * 3 + [Rated([0.0], [1.0], "hard")]
    easy, hard, whole = accuracies(items)
    assert [one.subset for one in (easy, hard, whole)] == ["easy", "hard", "all"]
    assert (easy.accuracy, hard.accuracy, whole.accuracy, whole.score) == (1.0, 0.0, 0.75, 0.5)


def test_ties_by_hand() -> None:
    items = [
        Rated([5.0], [1.0], "ties", "ref:a"), Rated([5.0, 4.0], [1.0, 0.0], "ties", "tied:a"),  # gaps 4, 3; spread 1
        Rated([2.0], [1.5], "ties", "ref:b"), Rated([4.0, 2.0], [1.0], "ties", "tied:b"),  # gaps 0.5, 1; spread 2
        Rated([2.0], [3.0], "ties", "ref:c"), Rated([4.0, 4.0], [1.0], "ties", "tied:c"),  # gaps -1, 3; spread 0
    ]  # fmt: skip
    margins = (math.tanh(3 / 1 - 1) + math.tanh(0.5 / 2 - 1) + math.tanh(-math.inf)) / 3
    expected = 0.3 * 2 / 3 + 0.3 * 1 + 0.2 * 2 / 3 + 0.2 * 1 / 3 + 0.01 * margins
    assert ties_score(items) == pytest.approx(expected)
    (found,) = accuracies(items)
    assert found.accuracy == pytest.approx(5 / 6)
    assert found.score == pytest.approx(expected)
    equal = [Rated([1.0], [1.0], "ties", "ref:x"), Rated([1.0, 1.0], [1.0], "ties", "tied:x")]
    assert ties_score(equal) == 0.0
    assert ties_score(items[::2]) == pytest.approx(0.3 * 2 / 3)  # no prompt occurs as both


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="no scored prompts"):
        accuracies([])
    with pytest.raises(InputError, match="lacks right or wrong answers"):
        accuracies([Rated([1.0], [])])


BENCH = {  # prompts of each subset of RewardBench, whose 447 of math-prm count as 984
    "Chat": {"alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28,
             "mt-bench-med": 40},
    "Chat Hard": {"mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134,
                  "llmbar-adver-GPTInst": 92, "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46},
    "Safety": {"refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 154,
               "xstest-should-respond": 250, "donotanswer": 136},
    "Reasoning": {"math-prm": 447, **{f"hep-{one}": 164 for one in ("cpp", "go", "java", "js", "python", "rust")}},
}  # fmt: skip


def test_sections_of_rewardbench() -> None:
    rng = np.random.default_rng(2)
    items, scores = [], {}
    for section, subsets in BENCH.items():
        total, count = 0.0, 0
        for subset, prompts in subsets.items():
            wins = rng.random(prompts) < rng.random()
            items += [Rated([float(win)], [0.5], subset) for win in wins]
            weight = 984 if subset == "math-prm" else prompts
            total, count = total + weight * np.mean(wins), count + weight
        scores[section] = total / count
    found = {one.subset: one for one in accuracies(items)}
    assert {name: found[name].score for name in BENCH} == pytest.approx(scores)
    assert found["all"].score == pytest.approx(np.mean(list(scores.values())))
    assert [one.subset for one in accuracies(items)][-5:] == [*BENCH, "all"], "sections come after their subsets"
    other = accuracies([*items, Rated([1.0], [0.0], "Focus")])
    assert not {one.subset for one in other} & set(BENCH), "a subset that is in no section: no sections"
