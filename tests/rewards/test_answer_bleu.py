"""BLEU of short answers, by hand."""

from __future__ import annotations

import math

import pytest

from jaxrl_llm.rewards.graded import answer_bleu

CASES = [
    (r"It is \boxed{Paris}", "paris", 1.0),
    ("<think>Rome?</think> Paris", "Paris", 1.0),
    ("the Paris", "Paris", 0.5),
    ("Paris", "Paris, France", math.exp(1 - 3)),  # the comma is a word
    ("a b c d e", "a b c d f", (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)),
    ("the the", "the cat", 0.0),  # one of two words, and no pair
    ("cat the", "the cat", 0.0),
    ("the the the", "the", 1 / 3),  # counted as often as expected
    ("", "Paris", 0.0),
    ("42.", "42", 0.5),
]


@pytest.mark.parametrize(("text", "expected", "score"), CASES)
def test_it_is_the_formula(text: str, expected: str, score: float) -> None:
    assert answer_bleu([text], [expected]) == pytest.approx([score])


def test_numbers_are_answers_too() -> None:
    assert answer_bleu(["<answer>42</answer>"] * 2, [42, 42.0]) == [1.0, 1.0]
