"""Rewards from their text form."""

from __future__ import annotations

import doctest
import hashlib
import sys
from pathlib import Path

import pytest

from jaxrl_llm.rewards import Reward, get_reward, get_rewards, names, registry, reward_digest, score
from jaxrl_llm.rewards.workers.process import ProcessFunction
from jaxrl_llm.utils.errors import InputError, InputErrors

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass

BONUS = 2.0

def brevity(completions, **_):
    return [BONUS - len(completion) for completion in completions]
"""

DATACLASS = """
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass

@dataclass
class Point:
    _: KW_ONLY
    x: int

def half(completions):
    import fractions
    return [float(fractions.Fraction(Point(x=1).x, 2))]
"""


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(registry) == (0, 1)


def test_names_are_all_known() -> None:
    assert names() == [
        "answer_bleu", "answer_format_reward", "answer_tags", "box_confidence", "box_format", "box_overlap", "by_mode",
        "class_match", "code_tests", "coverage", "distances", "environment", "exact_match", "first_error",
        "format_match", "given", "gui_action", "gui_click", "gui_format", "gui_kind", "gui_parameter", "judge",
        "math_verify", "math_verify_strict", "number_match", "number_match_strict", "one_answer", "reasoning_gym",
        "tagged_levels", "tagged_match", "think_format_reward",
        "useful_calls", "valid_calls",
    ]  # fmt: skip
    for name in names():
        argument = {
            "by_mode": "(number_match)",
            "code_tests": "(tests)",
            "coverage": "(c)",
            "distances": "(exact_match)",
            "format_match": "(.*)",
            "useful_calls": "(exact_match, 8, 16, 1)",
        }
        assert get_reward(name + argument.get(name, "")).name == name
    for name, wrong in {"by_mode": "NAME", "coverage": "COLUMN"}.items():
        with pytest.raises(InputError, match=rf"reward '{name}' needs an argument: {name}\({wrong}\)"):
            get_reward(name)
    with pytest.raises(InputError, match=r"unknown reward in by_mode\(...\) 'no'. Known"):
        get_reward("by_mode(no)")
    for wrong in ("exact_match, a", "exact_match, 1, 2, 3, 4", "exact_match, 8, 16, 0.5"):
        with pytest.raises(InputError, match="after the name of a reward there are C_S, C_Q and the whole number B_v"):
            get_reward(f"useful_calls({wrong})")
    with pytest.raises(InputError, match=r"C_S 0\.0 and C_Q 16\.0 must be above 0, and B_v 1"):
        get_reward("useful_calls(exact_match, 0)")


@pytest.mark.parametrize(
    "spec, weight",
    [("number_match", 1.0), ("number_match*0.5", 0.5), (" number_match * -2 ", -2.0), ("number_match*1e-2", 0.01)],
)
def test_weights(spec: str, weight: float) -> None:
    reward = get_reward(spec)
    assert isinstance(reward.function, ProcessFunction)
    assert reward.function.name == reward.name == "number_match"
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
        ("format_match(a", "is not closed"),
        ("format_match([)", "not a regular expression"),
        ("format_match(a{99999999999})", "not a regular expression"),
        (f"format_match({'(' * 5000}{')' * 5000})", "not a regular expression"),
        ("nowhere.py:f", "no reward file 'nowhere.py'"),
        ("rewards.py", "names no function"),
        ("no_such_module_here:f", "cannot load rewards from 'no_such_module_here': ModuleNotFoundError"),
        ("math:sinn", "unknown function of 'math', 'sinn': did you mean 'sin"),
        ("math:pi", "unknown function of 'math', 'pi'"),
    ],
)
def test_bad_specs_say_what_to_do(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        get_reward(spec)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("")
    with pytest.raises(InputErrors) as caught:
        get_rewards(["nothing", "number_match", f"{path}:f", "format_match([)", "exact_match*x"])
    for part in ("unknown reward 'nothing'", "'x' is not a weight", "unknown function of", "not a regular expression"):
        assert part in str(caught.value)
    assert len(caught.value.problems) == 4
    with pytest.raises(InputError, match="needs a list"):
        get_rewards("number_match")
    with pytest.raises(InputError, match="found int"):
        get_reward(3)  # type: ignore[arg-type]


def test_relative_paths_start_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "own.py").write_text("def first(completions): return [float(open('data.txt').read())]")
    (tmp_path / "data.txt").write_text("7")
    reward = get_reward("inner/own.py:first", tmp_path)
    assert score([reward], ["a"], {}).total.tolist() == [7.0]
    with pytest.raises(InputError, match=f"no reward file 'own.py' in {tmp_path}: give"):
        get_reward("own.py:first", tmp_path)


def test_the_digest_is_of_the_file_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f(completions): return [1.0]")
    first = get_reward(f"{path}:f")
    path.write_text("def f(completions): return [2.0]")  # as long, and in the same second
    second = get_reward(f"{path}:f")
    assert score([second], ["a"], {}).total.tolist() == [2.0]
    assert reward_digest(second) == hashlib.sha256(path.read_bytes()).hexdigest() != reward_digest(first)
    assert reward_digest(get_reward("number_match")) == reward_digest(get_reward("format_match(a)")) != ""
    assert reward_digest(Reward(len)) == reward_digest(get_reward("sys:exit")) == ""
    assert list(tmp_path.iterdir()) == [path]  # no compiled file beside it


def test_dataclasses_in_a_reward_file(tmp_path: Path) -> None:
    """They look their module up by its name. The file is named like a module that is imported later."""
    path = tmp_path / "fractions.py"
    path.write_text(DATACLASS)
    assert score([get_reward(f"{path}:half")], ["a"], {}).total.tolist() == [0.5]


def test_a_missing_package_of_a_built_in_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = str(Path(registry.__file__).parents[2])
    monkeypatch.setattr(sys, "path", [library, *(entry for entry in sys.path if "site-packages" not in entry)])
    with pytest.raises(InputError, match=r"'math_verify' needs .*pip install 'jaxrl_llm\[verifiers\]'"):
        get_reward("math_verify")


def test_a_file_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken_reward_file.py"
    path.write_text("raise RuntimeError('half written')")
    with pytest.raises(InputError, match="RuntimeError: half written"):
        get_reward(f"{path}:f")
