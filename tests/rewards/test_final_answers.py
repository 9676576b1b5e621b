"""Final answers in boxes and tags, and numbers as people write them, on examples worked out by hand."""

from __future__ import annotations

import doctest
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.rewards import verifiers
from jaxrl_llm.rewards.parsing import final_answers
from jaxrl_llm.rewards.parsing.answers import expression, final_number
from jaxrl_llm.rewards.parsing.code_blocks import code_in
from jaxrl_llm.rewards.parsing.final_answers import answer_text, final_answer, is_huge, last_number, numeric_value
from jaxrl_llm.utils.errors import InputError

NUMBERS = {
    "1,234,567.5": "1234567.5",
    "1 000": "1000",
    "12 500": "12500",
    "250 000": "250000",
    "1 234 567": "1234567",
    "1.000.000": "1000000",
    "1.000.000,5": "1000000.5",
    "1'000": "1000",
    "1\u2019000": "1000",
    "1_000": "1000",
    "1\u2009000": "1000",
    "1\u202f234,5": "1234.5",
    "1\u00a0000": "1000",
    "1{,}000": "1000",
    r"1\,000": "1000",
    r"1\ 000": "1000",
    "1~000": "1000",
    "12,34,567": "1234567",
    "1 1/2": "3/2",
    "-2 3/4": "-11/4",
    "1\u00bd": "3/2",
    "\u00be": "3/4",
    r"1\frac{1}{2}": "3/2",
    r"1 \frac12": "3/2",
    r"\frac{3}{4}": "3/4",
    r"\dfrac34": "3/4",
    r"-\tfrac{1}{2}": "-1/2",
    "3e5": "300000",
    r"3 \times 10^5": "300000",
    "3*10^5": "300000",
    "3 x 10^{5}": "300000",
    "3\u00d710\u2075": "300000",
    r"3 \cdot 10^{-2}": "3/100",
    "3*10**5": "300000",
    "10^3": "1000",
    "10\u207b\u00b2": "1/100",
    "-10^{2}": "-100",
    "\u22125": "-5",
    "\u20135": "-5",
    "\uff0d5": "-5",
    "\ufe635": "-5",
    "-$5": "-5",
    "$-5": "-5",
    "\uff14\uff12": "42",
    "\u0664\u0662": "42",
    "\u06f4\u06f2": "42",
    "\u096a\u0968": "42",
    "\u0663\u066b\u0665": "3.5",
    "\u0661\u066c\u0660\u0660\u0660": "1000",
    "\uff11\uff0c\uff10\uff10\uff10": "1000",
    "42%": "42",
    "\u20ac42": "42",
    "42.": "42",
    "3/4": "3/4",
    "\uff13\uff0f\uff14": "3/4",
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_as_people_write_them(text: str, value: str) -> None:
    wanted = Fraction(value)
    for said in (text, f"So it is {text}", f"In 7 steps: {text}\n", f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        assert verifiers.number_match([said], answer=[value]) == [1.0]
        assert verifiers.number_match([said], answer=[str(wanted + 1)]) == [0.0]
    assert numeric_value(text) == last_number(text) == wanted
    assert verifiers.number_match([value], answer=[text]) == [1.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100 200 300", "300"),
        ("1 2 3", "3"),
        ("10-20", "20"),
        ("10\u201320", "20"),
        ("5-3", "3"),
        ("version 1.2.3", "1.2"),
        ("3,14159", "14159"),
        ("6 * 10 = 60", "60"),
        ("2^10", "10"),
        ("1.000", "1"),
        ("see 2, 000", "0"),
    ],
)
def test_what_is_no_number_of_that_kind(text: str, value: str) -> None:
    assert last_number(text) == Fraction(value)


def test_whole_texts_that_are_no_number() -> None:
    assert [numeric_value(text) for text in ("x = 5", "1, 2", "(1,234)", "", "4 apples", "1/0", "7" * 1001)] == [
        None
    ] * 7


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed {5}", "5"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}"),
        (r"\framebox{x}", "x"),
        (r"\boxed\pi", r"\pi"),
        (r"\boxed{1}. Wait, no: \boxed{2}", "2"),
        (r"\boxed{1} and so on, in the end \fbox{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{1}$, $\boxed{2}$, or $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1}. \boxed{2}", "2"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"),
        (r"\boxed{1} then \boxed{2 + ", "1"),
        ("<answer>42</answer>", "42"),
        ("<answer>\n 42\n</answer> Done.", "42"),
        ("<answer>1</answer> no <answer>2</answer>", "2"),
        ("<Answer>4</Answer>", "4"),
        ("<answer>4", "4"),
        (r"<answer>It is \boxed{4}.</answer>", "4"),
        (r"\boxed{1}<answer>2</answer>", "2"),
        (r"<answer>1</answer> No: \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>so \boxed{1}</think> It is 1.", "1"),
        ("42", None),
        (r"\boxed", None),
        (r"\boxed{4", None),
        (r"\boxedx{4}", None),
    ],
)
def test_the_last_box_or_tag_is_the_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


MATH = [
    ("<think>2 + 40</think><answer>42</answer>", "42"),
    ("<answer>3/4</answer>", "3/4"),
    ("<answer>-7</answer>", "-7"),
    ("<answer>\\frac{3}{4}</answer>", "0.75"),
    ("<answer>$x^2+1$</answer>", "1+x^2"),
    ("<answer>The answer is 42.</answer>", "42"),
    ("`42`", "42"),
    ("(42)", "42"),
    ("**42**", "42"),
    ("It is `42`.", "42"),
    ("\\boxed{1}. Wait, no: \\boxed{2}", "2"),
    ("\\boxed{1}\n\nWait, I made a mistake. The answer is \\boxed{2}", "2"),
    (r"\fbox{7}", "7"),
    (r"\boxed 7", "7"),
    (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{1\frac{1}{2}}", "3/2"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{3 \times 10^5}", "300000"),
    ("\\boxed{\u22125}", "-5"),
    ("\\boxed{\uff14\uff12}", "42"),
    (r"\boxed{1 1/2}", "1.5"),
    (r"\boxed{1} and \boxed{-1}", r"\{1, -1\}"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{1\,000}", "1000"),
    ("<answer>4", "4"),
    (r"<think>\boxed{3}</think>\boxed{4}", "4"),
    (r"\boxed{2^{3^2}}", "512"),
    (r"\boxed{0.333333}", "1/3"),
]


@pytest.mark.parametrize("form", ["The answer is {}.", "It is {}", "{}", "**Answer:** {}\n", "\\boxed{{{}}}"])
def test_math_verify_reads_numbers_as_people_write_them(form: str) -> None:
    pytest.importorskip("math_verify")
    texts = [form.format(text) for text in NUMBERS]
    found = verifiers.math_verify(texts, answer=list(NUMBERS.values()))
    assert [text for text, one in zip(texts, found, strict=True) if one != 1.0] == []
    others = verifiers.math_verify(texts, answer=[str(Fraction(value) + 1) for value in NUMBERS.values()])
    assert [text for text, one in zip(texts, others, strict=True) if one != 0.0] == []


@pytest.mark.parametrize(("text", "answer"), MATH)
def test_math_verify_reads_final_answers(text: str, answer: str) -> None:
    pytest.importorskip("math_verify")
    assert verifiers.math_verify([text], answer=[answer]) == [1.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{2}. Wait, no: \boxed{1}", "2"),
        ("<answer>41</answer> or 42", "42"),
        (r"\boxed{}42", "42"),
        ("", "42"),
        (r"\boxed{9^{9^{9^{9}}}}", "42"),
        ("9**9**9**9", "42"),
        (r"\boxed{10^{10^{10}}}", "42"),
        (r"\boxed{(((5!)!)!)!}", "1"),
    ],
)
def test_math_verify_refuses_other_answers(text: str, answer: str) -> None:
    pytest.importorskip("math_verify")
    assert verifiers.math_verify([text], answer=[answer]) == [0.0]


def test_strict_forms_want_a_box_or_a_tag() -> None:
    pytest.importorskip("math_verify")
    texts = ["It is 42.", r"It is \boxed{42}.", "<answer>42</answer>", r"\boxed{41}"]
    assert verifiers.number_match(texts, answer=[42] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert verifiers.number_match_strict(texts, answer=[42] * 4) == [0.0, 1.0, 1.0, 0.0]
    assert verifiers.math_verify(texts, answer=["42"] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert verifiers.math_verify_strict(texts, answer=["42"] * 4) == [0.0, 1.0, 1.0, 0.0]


def test_keys_are_of_the_final_answer() -> None:
    pytest.importorskip("math_verify")
    assert final_number(r"\boxed{1 000}. That took 3 steps.") == "1000"
    assert expression("<answer>1/2</answer>") == expression(r"\boxed{\frac{2}{4}}, in 3 steps") == "0.5"


def test_answers_that_are_no_text() -> None:
    values: list[Any] = [42.0, 42, ["42"], [42.0], np.int64(42), np.float32(42), "42", np.asarray(["42"]).tolist()]
    assert [answer_text(value) for value in values] == ["42"] * len(values)
    assert (answer_text(0.1), answer_text(True), answer_text(Fraction(1, 2))) == ("0.1", "True", "1/2")
    for reward in (verifiers.number_match, verifiers.math_verify, verifiers.exact_match):
        assert reward(["42"] * len(values), answer=values) == [1.0] * len(values)
        for wrong in (None, ["1", "2"], {"a": 1}, float("nan"), []):
            with pytest.raises(InputError, match=r"the answer is .*, but must be a text or a number"):
                reward(["42"], answer=[wrong])
    assert verifiers.exact_match(["42.0", "42", "43"], answer=[42.0] * 3) == [1.0, 1.0, 0.0]


def test_huge_numbers_are_known_without_computing_them() -> None:
    huge = ["9^{9^{9^{9}}}", "9**9**9", "10^(10^10)", "2^{99999999}", "((5!)!)!", "99999!", "7^7^7^7^7^7"]
    small = ["2^{3^2}", "10^{100}", "5!", "(3!)!", "x^{2^n}", "2^10 = 1024", "0.5^2"]
    assert [is_huge(text) for text in huge] == [True] * len(huge)
    assert [is_huge(text) for text in small] == [False] * len(small)


ENDLESS = [
    "<answer>",
    "\\boxed{",
    "\\boxed{1} and ",
    "{",
    "1 ",
    "1 000 ",
    "1/",
    "10^",
    "-",
    "(",
    "`",
    "\\frac{",
    "$",
    "a",
]


@pytest.mark.parametrize("part", ENDLESS)
def test_what_a_policy_repeats_takes_no_time(part: str) -> None:
    """Expressions that search for pairs easily take the square of the length."""
    pytest.importorskip("math_verify")
    start = time.monotonic()
    text = part * (100_000 // len(part))
    for read in (
        final_answer,
        last_number,
        is_huge,
        numeric_value,
        final_answers.with_usual_numbers,
        verifiers.last_tagged,
    ):
        read(text)
    assert verifiers.math_verify([text], answer=["42"]) == [0.0]
    assert code_in(text) is not None
    assert time.monotonic() - start < 5


def test_long_texts_end_with_their_answer() -> None:
    pytest.importorskip("math_verify")
    line = "We find $x_1 = 3$ and go on with $x_2$. "
    for text in (line * 200 + "The answer is $42$.", (line * 3 + "\n") * 70 + "It is 42."):
        assert verifiers.math_verify([text], answer=["42"]) == [1.0]


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(final_answers) == (0, 5)
