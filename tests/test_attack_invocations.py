"""Malformed invocations of the command line: a share of the table, and that the table is what it should be."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import attack
from experiments.attacks import Outcome
from experiments.attacks.invocations import Ended, changes, fingerprint, judge, median_seconds, run
from experiments.attacks.table import BUILDERS, Row, arguments_of, make_files, read_table

SHARE, SEED = 12, 12


def test_the_table() -> None:
    """At least 450 cases, each with a name of its own, and expressions that compile and do not match everything."""
    rows = read_table()
    names = [row["name"] for row in rows]
    assert len(rows) >= 450
    assert len(set(names)) == len(names)
    for row in rows:
        expected = [row["expect"]] if isinstance(row["expect"], str) else row["expect"]
        assert row.get("status", 2) == 0 or not any(re.search(text, "error: ") for text in expected), row["name"]
        assert all(not isinstance(x, list) or x[0] in BUILDERS for x in row.get("files", {}).values()), row["name"]
    assert sum(not row.get("needs_model") for row in rows) >= 300
    assert {row["arguments"][0].split(" ")[0] for row in rows} >= {
        "$TRAIN", "train", "eval", "sample", "algorithms", "report", "export"
    }  # fmt: skip


@pytest.mark.heavy
def test_a_share_of_the_table() -> None:
    """Rows without a model, chosen by a seed; `experiments/attack.py` runs all."""
    table = read_table()
    quick = [row["name"] for row in table if not row.get("needs_model") and "$R" not in repr(row)]
    outcomes = run(table, attack.share(quick, SHARE, SEED), workers=2)
    assert len(outcomes) == SHARE
    assert [outcome for outcome in outcomes if outcome.verdict != "clear"] == []


ERROR = "error: steps is 0, but must be at least 1\n"
ROW: Row = {"name": "x", "arguments": [], "expect": "steps is 0"}


@pytest.mark.parametrize(
    ("ended", "changed", "verdict"),
    [
        (Ended(2, 0.1, "", ERROR), "", "clear"),
        (Ended(2, 0.1, "", ERROR + "more\n"), "", "unclear"),
        (Ended(2, 0.1, "", "WARNING: steps is 0\n"), "", "unclear"),
        (Ended(2, 0.1, "", "error: bad value\n"), "", "unclear"),
        (Ended(2, 0.1, "", "error: steps is 0" + "!" * 1000 + "\n"), "", "unclear"),
        (Ended(2, 0.1, "", ""), "", "unclear"),
        (Ended(1, 0.1, "", "Traceback (most recent call last):\nValueError: steps is 0\n"), "", "unclear"),
        (Ended(-9, 0.1, "", ERROR), "", "unclear"),
        (Ended(0, 0.1, "report\n", ""), "", "silent"),
        (Ended(1, 0.1, "report\n", ""), "", "unclear"),
        (Ended(2, 0.1, "", ERROR), "run is new", "wrong"),
        (Ended(None, 60.0, "", ERROR, "no end within 60 s"), "", "hang"),
    ],
)
def test_verdicts(ended: Ended, changed: str, verdict: str) -> None:
    assert judge(ROW, ended, changed)[0] == verdict


def test_several_errors_need_a_line_each() -> None:
    row = {**ROW, "expect": ["steps is 0", "is 0"]}
    assert judge(row, Ended(2, 0.1, "", ERROR), "")[0] == "unclear"
    assert judge(row, Ended(2, 0.1, "", ERROR + "error: seed is 0\n"), "")[0] == "clear"
    assert judge(row, Ended(2, 0.1, "", ERROR + "error: seed is -1\n"), "")[0] == "unclear"


def test_what_must_be_accepted() -> None:
    row = {**ROW, "status": 0, "expect": "report"}
    assert judge(row, Ended(0, 0.1, "report: x\n", ""), "run is changed")[0] == "clear"
    assert judge(row, Ended(2, 0.1, "", "error: no report\n"), "")[0] == "unclear"


def test_changes_are_seen(tmp_path: Path) -> None:
    make_files({"files": {"a/b": "1", "l": ["link", "nothing"], "p": ["pipe"]}}, tmp_path, {})
    before = fingerprint(tmp_path)
    assert before["l"] == "link nothing"
    assert before["p"] == "special"
    assert changes(before, fingerprint(tmp_path)) == ""
    (tmp_path / "a" / "b").write_text("2")
    assert changes(before, fingerprint(tmp_path)) == "a/b is changed"
    (tmp_path / "a" / "b").unlink()
    assert changes(before, fingerprint(tmp_path)) == "a/b is gone"
    os.mkdir(tmp_path / "a" / "a")
    assert changes(before, fingerprint(tmp_path)) == "a/a is new"


def test_placeholders(tmp_path: Path) -> None:
    row = {"arguments": ["$TRAIN -steps -remat", "--seed", "$HERE/x"]}
    arguments = arguments_of(row, {"HERE": tmp_path, "MODEL": tmp_path / "m"})
    assert arguments[:3] == ["train", "--model", str(tmp_path / "m")]
    assert arguments[-2:] == ["--seed", str(tmp_path / "x")]
    assert "--no-tensorboard" in arguments
    assert not {"--steps", "--no-remat"} & set(arguments)


def test_the_report_of_an_attack() -> None:
    found = [
        Outcome("invocations", "a", "clear", 0.5, ""),
        Outcome("invocations", "b", "hang", 60.0, "no end"),
        Outcome("kills", "c", "clear", 3.0, ""),
    ]
    lines = attack.report(found).splitlines()
    assert lines[2:4] == ["| kills, 1 | 1 | 0 | 0 | 0 | 0 |", "| invocations, 2 | 1 | 0 | 0 | 1 | 0 |"]
    assert lines[-1] == "- hang: invocations: b (60.0 s): no end"


def test_the_median_is_of_errors_without_a_model() -> None:
    table: list[Row] = [ROW, {**ROW, "name": "y", "needs_model": True}, {**ROW, "name": "z", "status": 0}]
    found = [
        Outcome("invocations", name, "clear", seconds, "") for name, seconds in (("x", 1.0), ("y", 9.0), ("z", 9.0))
    ]
    assert median_seconds(found, table) == 1.0


def test_shares() -> None:
    names = [str(i) for i in range(50)]
    assert attack.share(names, None, 0) == names
    assert attack.share(names, 99, 0) == names
    some = attack.share(names, 5, 3)
    assert len(some) == 5
    assert some == sorted(some, key=int)
    assert some == attack.share(names, 5, 3)
    assert some != attack.share(names, 5, 4)
