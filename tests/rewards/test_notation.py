"""Formulas in plain notation, letters of options, and numbers that differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.rewards.parsing.readings import as_latex, choice_of, same_text
from jaxrl_llm.rewards.verifiers import math_verify
from jaxrl_llm.utils.errors import InputError

LATEX = {
    "sqrt(2)": r"\sqrt{2}", r"\sqrt(2)": r"\sqrt{2}", "2*sqrt(x**2+1)": r"2*\sqrt{x^2+1}", "exp(16)": "e^{16}",
    "pi/2": r"\pi /2", "sin(x)": r"\sin (x)", r"\sin x": r"\sin x", "2^(1/2)": "2^{1/2}", "\u221a2": r"\sqrt{2}",
    "\u221a(x+1)": r"\sqrt{x+1}", "x\u00b2": "x^{2}", "10\u207b\u00b3": "10^{-3}", "\u221e": r"\infty ",
    "14.0 + -1.0i": "14 -i",
    r"\frac\pi2": r"\frac{\pi}{2}", r"\frac12": r"\frac{1}{2}", r"\frac{a}b": r"\frac{a}{b}", "sqrt(2": "sqrt(2",
    r"\mathrm{e}": "e ", "3.05": "3.05", r"\text{pi}": r"\text{pi}", "spin": "spin",
    "f(sqrt(sqrt(2)))": r"f(\sqrt{\sqrt{2}})",
}  # fmt: skip


@pytest.mark.parametrize("text", LATEX)
def test_plain_notation_is_latex(text: str) -> None:
    assert as_latex(text) == LATEX[text]


@given(st.text("sqrt()exp^*\\{}frac12\u221a\u00b2+-.i ", max_size=30))
def test_any_text_has_a_form_that_stays(text: str) -> None:
    assert len(as_latex(text)) <= 20 * len(text) + 20


LETTERS = {
    "B": "B", "(B)": "B", "**B**": "B", "$B$": "B", r"\text{B}": "B", r"\textbf{(B)}\ 12": "B", "B) 12": "B",
    "B: a cat": "B", "B. a cat": "B", "The answer is B.": "B", "The answer is (B), since": "B", "answer: **B**": "B",
    "Option A is wrong. The answer is C": "C", "Because": None, "A cat": None, "12": None, "The answer is a cat": None,
    "The answer is A + 2": None, "K": None,
}  # fmt: skip


@pytest.mark.parametrize("text", LETTERS)
def test_a_choice_is_its_letter(text: str) -> None:
    assert choice_of(text) == LETTERS[text]


def test_dots_are_compared_as_text() -> None:
    assert same_text(r"1, 2, \ldots, n", "1,2,...,n")
    assert not same_text(r"1, 3, \ldots, n", "1,2,...,n")


JUDGED = [
    ("\\boxed{B}", "B", 1.0), ("\\boxed{C: B is wrong}", "B", 0.0), ("**(B)**", "B", 1.0),
    ("\\boxed{10^{-9}}", "10^{-8}", 0.0), ("\\boxed{10^{-9}}", "10^{-9}", 1.0),
    ("\\boxed{0.0005}", "\\frac{1}{2000}", 1.0), ("\\boxed{0.0006}", "\\frac{1}{2000}", 0.0),
    ("\\boxed{-\\frac{1}{10^{7}}}", "\\frac{1}{10^{7}}", 0.0), ("\\boxed{0}", "\\sqrt{2}\\sqrt{3}-\\sqrt{6}", 1.0),
    ("\\boxed{12345678901234567891}", "12345678901234567890", 0.0),
    ("\\boxed{\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", 1.0),
    ("\\boxed{\\frac14}", "\\begin{pmatrix}\\frac14&2\\\\3&4\\end{pmatrix}", 0.0),
    ("\\boxed{x**2 - 1}", "(x-1)(x+1)", 1.0), ("x^2 - 1", "x**2 - 1", 1.0),
    ("(3, \\frac{\\pi}{2})", "(3, \\pi/2)", 1.0),
    ("\\boxed{x >= 2}", "[2, \\infty)", 1.0), ("\\boxed{(2, \\infty)}", "x \\ge 2", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer", "right"), JUDGED)
def test_formulas_are_judged_by_what_they_say(text: str, answer: str, right: float) -> None:
    assert math_verify([text], answer=[answer]) == [right]


def test_an_answer_that_would_be_cut_is_refused() -> None:
    with pytest.raises(InputError, match="math_verify cannot parse the answer"):
        math_verify(["\\boxed{1}"], answer=["$1 - \\frac{1}{\\mathrm{cm}}$"])
