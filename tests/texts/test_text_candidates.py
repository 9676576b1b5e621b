"""Candidates with their statistics, and the rules that select them, by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxrl_llm.texts import Candidate, Experience, State, apart, distance, observed, softmax, top
from jaxrl_llm.texts.candidates import draw_places, replaced, state_of_json
from jaxrl_llm.utils.errors import InputError


def test_softmax_is_the_worked_example() -> None:
    weights = [0.2, 0.5, 0.4]
    np.testing.assert_allclose(softmax(weights), [0.280013, 0.377978, 0.342009], atol=1e-6)
    np.testing.assert_allclose(softmax(weights, 0.1), [0.035119, 0.705385, 0.259496], atol=1e-6)
    assert softmax([1e4, 0.0]).tolist() == [1.0, 0.0]


def test_statistics_are_sums_and_unscored_answers_do_not_count() -> None:
    one = observed(Candidate("a", 1.0, 2, ("x",)), [1.0, math.nan, 0.0], ["y", "z"], keep=2)
    assert one == Candidate("a", 2.0, 4, ("y", "z"))
    assert (one.mean, Candidate("b").mean) == (0.5, 0.0)


def test_the_best_are_those_of_the_largest_mean_and_the_older_of_equals() -> None:
    memory = [Candidate("a", 1, 4), Candidate("b", 3, 4), Candidate("c", 6, 8), Candidate("d")]
    assert [one.text for one in top(memory, 3)] == ["b", "c", "a"]
    assert replaced(memory, [Candidate("e"), Candidate("b", 4, 5)])[1::3] == (Candidate("b", 4, 5), Candidate("e"))


def test_distance_is_one_minus_the_cosine_of_word_counts() -> None:
    assert distance("add the ones", "Add the ones.") == 0
    assert distance("a a b", "a b b") == pytest.approx(1 - 4 / 5)  # (2, 1) and (1, 2)
    assert distance("a", "b") == 1
    assert (distance("", ""), distance("", "a")) == (0, 1)


def test_the_net_keeps_texts_that_are_far_from_all_kept_ones() -> None:
    texts = ["a b c", "a b d", "x y z", "x y w"]
    assert distance("a b c", "a b d") == pytest.approx(1 / 3)
    assert apart(texts, ["a b e"], 0.5) == ["x y z"]
    assert apart(texts, ["a b e"], 0.3) == texts
    assert apart(["q", "q"], [], 0.0) == ["q"]


def test_places_are_drawn_without_those_of_no_probability() -> None:
    random = np.random.default_rng(1)
    assert sorted(draw_places(random, np.array([0.5, 0.0, 0.5]), 5)) == [0, 2]
    counts = np.bincount([draw_places(random, np.array([0.75, 0.25]), 1)[0] for _ in range(400)])
    assert abs(counts[0] - 300) < 40


def test_a_state_goes_through_json_and_a_damaged_one_is_refused() -> None:
    state = State("first", (Candidate("a", 0.1, 3, ("x", "y")),), (Experience("e", 1.0, 2),))
    assert state_of_json(json.loads(json.dumps(state.as_json()))) == state
    for wrong in (None, {}, {"first": "a", "candidates": [{}], "experiences": []}):
        with pytest.raises(InputError, match="damaged: begin a new run"):
            state_of_json(wrong)
