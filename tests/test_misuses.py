"""Misuses of the Python API end in one clear line: a share of the table, chosen by a fixed seed, and what judges it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from heavy import few

from experiments.attacks import VERDICTS, misuses
from experiments.attacks.misuse_tools import Tools, make_tools
from experiments.attacks.misuses import FINE, MISUSES, NAMES, judge, judged, run, table
from experiments.attacks.misuses_names import OTHER_NAMES

SEED = 14
SHARE = random.Random(SEED).sample(sorted(MISUSES.keys() - OTHER_NAMES.keys()), 40)
ALLOWED = random.Random(SEED).sample(sorted(FINE), 4)


@pytest.fixture(scope="module")
def tools() -> Iterator[Tools]:
    made = make_tools()
    yield made
    made.close()


def test_the_table_has_1200_rows_with_names_of_their_own() -> None:
    parts = (
        misuses.BATCHES, misuses.METHODS, misuses.SAMPLING, misuses.TRAINING, misuses.INPUTS, OTHER_NAMES,
        misuses.WORLDS, misuses.PLANS,
    )  # fmt: skip
    assert len(MISUSES) == sum(map(len, parts)) >= 1200
    assert len(set(NAMES)) == len(NAMES) == len(MISUSES) + len(FINE)


@pytest.mark.parametrize("name", few(SHARE, SHARE[:10]))
def test_a_misuse_is_one_clear_line(name: str, tools: Tools) -> None:
    verdict, said = judged(name, tools)
    assert verdict == "clear", said


@pytest.mark.parametrize("name", [*misuses.WORLDS, *misuses.PLANS])
def test_a_misuse_of_environments_rollouts_meshes_or_laboratories_is_one_clear_line(name: str, tools: Tools) -> None:
    """All rows, since they take no time."""
    verdict, said = judged(name, tools)
    assert verdict == "clear", said


@pytest.mark.parametrize("name", [name for name in OTHER_NAMES if "Lab(iterations=2)" not in name])
def test_a_misuse_of_names_and_settings_is_one_clear_line(name: str, tools: Tools) -> None:
    """Needs, revised credit, settings as dicts, names of TRL, formats, values: all rows, since they take no time."""
    verdict, said = judged(name, tools)
    assert verdict == "clear", said


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_works(name: str, tools: Tools) -> None:
    assert judged(name, tools) == ("clear", "fine")


def test_messages_are_judged_and_not_believed() -> None:
    assert judge("clip_low is -1, but must be at least 0", "clip_low is -1")[0] == "clear"
    assert judge("it does not work", "clip_low is -1")[0] == "unclear"
    assert judge("clip_low is -1\nand more", "clip_low is -1")[0] == "unclear"
    assert judge("clip_low is -1" + 400 * ".", "clip_low is -1")[0] == "unclear"


def test_every_verdict_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    rows = {
        "algorithms.get('gropo')": ("clear", "did you mean 'grpo'"),
        "1 / 0": ("unclear", "ZeroDivisionError: division by zero"),
        "1 + 1": ("silent", "gave int"),
        "tools.stop.wait()": ("hang", "no end within 0.5 s"),
    }
    monkeypatch.setattr(misuses, "MISUSES", dict.fromkeys(rows, "grpo"))
    monkeypatch.setattr(misuses, "FINE", ("2 > 1", "1 > 2"))
    monkeypatch.setattr(Tools, "stop", stop, raising=False)
    outcomes = run([*list(rows)[1:], "2 > 1", "1 > 2"], limit=0.5) + run([next(iter(rows))])
    stop.set()
    found = {outcome.name: outcome for outcome in outcomes}
    for name, (verdict, said) in {**rows, "2 > 1": ("clear", "fine"), "1 > 2": ("wrong", "gave False")}.items():
        assert found[name].verdict == verdict
        assert said in found[name].said
    assert {outcome.verdict for outcome in outcomes} == set(VERDICTS)
    assert {outcome.attack for outcome in outcomes} == {"misuses"}
    assert "1 > 2" in table(outcomes)
    assert "2 > 1" not in table(outcomes)
