"""Prompt templates: what they may hold, and that none makes a prompt without bounds."""

from __future__ import annotations

import datetime

import pytest

from jaxrl_llm.data import template
from jaxrl_llm.data.template import fill, read_template
from jaxrl_llm.utils.errors import InputError

ROW = {"prompt": "1 + 1?", "answer": 2, "hint": None, "notes": {"unit": "apples", "of": ["a", "b"]}, "share": 0.25}


@pytest.mark.parametrize(
    "text, prompt",
    [
        ("{prompt}", "1 + 1?"),
        ("Q: {prompt} {{in}} {notes[unit]}", "Q: 1 + 1? {in} apples"),
        ("{notes[of][1]}{answer:>4}|{prompt!r:<10}|{share:.1%}", "b   2|'1 + 1?'  |25.0%"),
        ("{day:%Y} {prompt}", "2024 1 + 1?"),
    ],
)
def test_what_a_template_makes(text: str, prompt: str) -> None:
    assert fill(read_template(text), {**ROW, "day": datetime.date(2024, 2, 29)}, "row 1") == prompt


@pytest.mark.parametrize(
    "text, message",
    [
        ("Question?", "names no column, so every prompt would be the same: put {prompt} in it"),
        ("{{prompt}}", "names no column, so every prompt"),
        ("", "names no column, so every prompt"),
        (None, "prompt_template is None, but must be text"),
        (3, "prompt_template is 3"),
        ("{prompt:>9999999999}", "the format '>9999999999' of {prompt} is nested or wider than 10000 characters"),
        ("{prompt:>10001}", "wider than 10000 characters"),
        ("{share:.99999f}", "wider than 10000 characters"),
        ("{prompt:" + "9" * 5000 + "}", "wider than 10000 characters"),
        ("{prompt:{answer}}", "the format '{answer}' of {prompt} is nested"),
        ("{prompt.__class__}", "{prompt.__class__} is neither a column nor an entry of one"),
        ("{prompt.upper}", "neither a column nor"),
        ("{notes[unit].upper}", "neither a column nor"),
        ("{prompt!x}", "there is no conversion !x: use !s, !r or !a"),
        ("{prompt!}", "is not valid"),
        ("{prompt", "is not valid"),
        ("prompt}", "is not valid: Single '}'"),
        ("\\boxed{}{prompt}", "{} names no column; write {{ and }} for literal braces"),
        ("{0}", "{0} names no column"),
        ("{[a]}", "{[a]} names no column"),
    ],
)
def test_templates_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_template(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{promt}", "unknown column 'promt': did you mean 'prompt'"),
        ("{hint} {prompt}", "row 7: {hint} of prompt_template is None: remove"),
        ("{notes[none]}", "row 7: prompt_template cannot format {notes[none]}: KeyError: 'none'"),
        ("{notes[of][9]}", "IndexError"),
        ("{answer[0]}", "TypeError"),
        ("{prompt:d}", "row 7: prompt_template cannot format {prompt}: ValueError: Unknown format code 'd'"),
    ],
)
def test_rows_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        fill(read_template(text), ROW, "row 7")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_without_bounds_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MOST_CHARACTERS", 100)
    assert len(fill(read_template("{prompt:>100}"), ROW, "row 1")) == 100
    made = []
    monkeypatch.setattr(template, "_value", lambda *_: made.append(1) or "x" * 60)
    with pytest.raises(InputError, match="row 1: prompt_template gives a prompt of more than 100 characters"):
        fill(read_template("{prompt}" * 1000), ROW, "row 1")
    assert len(made) == 2
