"""JSON with bounds: values come back, and everything else is one reason with its line."""

from __future__ import annotations

import doctest
import json
import math

import pytest

from jaxrl_llm.utils import json as json_text
from jaxrl_llm.utils.json import MOST_DEPTH, NotJson, json_type, parse_json


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(json_text) == (0, 1)


@pytest.mark.parametrize("value", [None, True, 3, -2.5e300, "é😀 [[[", {"a": [1, {"b": []}]}, [{}] * 1000])
def test_values_come_back(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, indent=1, ensure_ascii=False)) == value


def test_nesting_up_to_the_bound_is_taken() -> None:
    text = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert json.dumps(parse_json(text)) == text
    flat = json.dumps([[[]]] * 500)
    assert parse_json(flat) == json.loads(flat)


@pytest.mark.parametrize(
    "text, reason, line",
    [
        ("", "not JSON: Expecting value at column 1", 1),
        ('{"a": 1,\n "b" 2}', "not JSON: Expecting ':' delimiter at column 6", 2),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "it is nested deeper than 64 levels", 0),
        ('{"a":' * 100_000, "it is nested deeper than 64 levels", 0),
        ("[1,\n" + "9" * 10_000 + "]", "a number of more than 4300 digits", 2),
        ("[NaN]", "NaN is no JSON number: write null where there is none", 0),
        ("[-Infinity]", "-Infinity is no JSON number: write null where there is none", 0),
        ("1e400", "the number 1e400 is beyond the range of floats", 0),
        ('["\\ud800"]', 'half of a surrogate pair, such as "\\ud800", which is no character', 0),
        ('{"\\uDFFF": 1}', 'half of a surrogate pair, such as "\\ud800", which is no character', 0),
    ],
)
def test_everything_else_is_one_reason(text: str, reason: str, line: int) -> None:
    with pytest.raises(NotJson) as caught:
        parse_json(text)
    assert (caught.value.reason, caught.value.line) == (reason, line)


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse_json('"\\ud83d\\ude00"') == "😀"


def test_lenient_takes_what_python_wrote() -> None:
    assert math.isnan(parse_json("NaN", lenient=True))
    assert parse_json('["\\ud800", Infinity, 1e400]', lenient=True) == ["\ud800", math.inf, math.inf]
    for text in ("[" * 100_000, "9" * 10_000, "[" * 65 + "]" * 65):
        with pytest.raises(NotJson):
            parse_json(text, lenient=True)


def test_kinds_have_the_names_of_json() -> None:
    assert [json_type(value) for value in (None, True, 1, 1.5, "a", [], {})] == [
        "null", "true or false", "number", "number", "text", "list", "object",
    ]  # fmt: skip
