"""Rewards from their text form."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import get_reward, names, registry, score, verifiers

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass

BONUS = 2.0

def brevity(completions, **_):
    return [BONUS - len(completion) for completion in completions]
"""


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(registry) == (0, 1)


def test_names_are_all_known() -> None:
    assert names() == ["exact_match", "format_match", "math_verify", "number_match", "reasoning_gym"]
    for name in names():
        assert get_reward("format_match(.*)" if name == "format_match" else name).name == name


@pytest.mark.parametrize(
    "spec, weight",
    [("number_match", 1.0), ("number_match*0.5", 0.5), (" number_match * -2 ", -2.0), ("number_match*1e-2", 0.01)],
)
def test_weights(spec: str, weight: float) -> None:
    reward = get_reward(spec)
    assert reward.function is verifiers.number_match
    assert reward.weight == weight


@pytest.mark.parametrize(
    "spec, weight, text, matches",
    [
        ("format_match(a*)", 1.0, "aaa", True),
        ("format_match(a*2)", 1.0, "aa2", True),
        ("format_match(a*)*0.2", 0.2, "aaa", True),
        ("format_match((a|b):c*)*0.2", 0.2, "b:cc", True),
        ("format_match(x.py:f)", 1.0, "x.py:f", True),
        ("format_match()", 1.0, "a", False),
    ],
)
def test_patterns_may_hold_stars_brackets_and_colons(spec: str, weight: float, text: str, matches: bool) -> None:
    reward = get_reward(spec)
    assert reward.weight == weight
    assert reward.function([text]) == [float(matches)]


def test_functions_from_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own_reward_file.py"
    path.write_text(SOURCE)
    reward = get_reward(f"{path}:brevity*0.5")
    assert (reward.name, reward.weight) == ("brevity", 0.5)
    assert score([reward], ["abc", ""], {}).total.tolist() == [-0.5, 1.0]
    monkeypatch.syspath_prepend(tmp_path)
    assert get_reward("own_reward_file:brevity").function(["a"]) == [1.0]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("number_mtch", "unknown reward 'number_mtch': did you mean 'number_match'"),
        ("", "unknown reward ''"),
        ("number_match*heavy", "'heavy' is not a weight"),
        ("number_match*inf", "is not a weight"),
        ("number_match(3)", "unknown reward"),
        ("format_match", r"needs a pattern: format_match\(REGEX\)"),
        ("format_match(a", "never closed"),
        ("format_match([)", "not a regular expression"),
        ("nowhere.py:f", "no reward file 'nowhere.py'"),
        ("rewards.py", "names no function"),
        ("no_such_module_here:f", "cannot load rewards from 'no_such_module_here': ModuleNotFoundError"),
        ("math:sinn", "unknown function in 'math' 'sinn': did you mean 'sin"),
        ("math:pi", "unknown function in 'math' 'pi'"),
    ],
)
def test_bad_specs_say_what_to_do(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        get_reward(spec)


def test_a_file_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken_reward_file.py"
    path.write_text("raise RuntimeError('half written')")
    with pytest.raises(InputError, match="RuntimeError: half written"):
        get_reward(f"{path}:f")
