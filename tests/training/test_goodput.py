"""The seconds of a run's phases add up to its wall time, and goodput is what they say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.reporting.logging.files import read_json
from jaxrl_llm.training import loop
from jaxrl_llm.training.health import goodput
from jaxrl_llm.training.health.goodput import Clock, lap_metrics, lost_time


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The time, and the seconds of compilation until then, as a clock sees them."""
    shown = {"time": 100.0, "compiling": 0.0}
    monkeypatch.setattr(goodput, "perf_counter", lambda: shown["time"])
    monkeypatch.setattr(goodput, "compiles", lambda: (0, shown["compiling"]))
    return shown


def test_every_moment_belongs_to_one_phase(now: dict[str, float]) -> None:
    clock = Clock()
    now["time"] += 1
    with clock("sample"):
        now["time"] += 2
        with clock("score"):
            now["time"] += 4
            assert clock.mark.phase == "score"
        now["time"] += 8
    now["time"] += 16
    assert clock.seconds == {"other": 17, "sample": 10, "score": 4, "compile": 0}
    assert clock.typical("sample") == 10
    assert clock.typical("update") == 0
    for took in (1.0, 3.0):
        with clock("sample"):
            now["time"] += took
    assert clock.typical("sample") == 3


def test_compiling_is_a_phase_of_its_own(now: dict[str, float]) -> None:
    clock = Clock()
    with clock("update"):
        now["time"] += 5
        now["compiling"] += 3
        assert clock.seconds["compile"] == 3, "in the middle of a phase too"
        now["time"] += 1
        now["compiling"] += 2  # in two threads
    assert clock.seconds == {"other": 0, "update": 2, "compile": 4}
    assert clock.typical("update") == 2


def test_a_phase_that_fails_counts_and_is_named() -> None:
    clock = Clock()
    with pytest.raises(KeyError), clock("sample"), clock("score"):
        raise KeyError
    assert clock.seconds["score"] > 0
    assert clock.failed == "score"


def test_laps_and_what_a_resumed_run_adds(now: dict[str, float]) -> None:
    clock = Clock()
    with clock("load"):
        now["time"] += 1
        clock.go_on({"load": 10.0, "sample": 20.0, "update": 30.0}, {"lost": 4.0, "down": 5.0})
    with clock("sample"):
        now["time"] += 2
    lap = lap_metrics(clock, undone=6.0)
    assert lap.pop("goodput") == pytest.approx((20 + 2 + 30 - 6) / (1 + 60 + 9 + 2))
    assert {name: value for name, value in lap.items() if value} == {
        "seconds/load": 1, "seconds/sample": 2, "seconds/lost": 4, "seconds/down": 5,
    }  # fmt: skip
    with clock("score"):
        now["time"] += 7
    assert {name: value for name, value in clock.lap().items() if value} == {"score": 7}


@pytest.mark.parametrize(
    ("saved", "alive", "restarted", "lost", "down"),
    [
        (100, 130, 190, 30, 60),
        (100, 0, 190, 0, 90),  # without logs
        (100, 250, 190, 90, 0),  # another machine's time
        (200, 130, 190, 0, 0),
    ],
)
def test_what_a_restart_loses(saved: float, alive: float, restarted: float, lost: float, down: float) -> None:
    assert lost_time(saved, alive, restarted) == {"lost": lost, "down": down}


def cumulated(lines: list[dict[str, Any]], *phases: str) -> np.ndarray:
    """Seconds until each line in these phases; without phases, in all."""
    of_line = [
        sum(v for k, v in line.items() if k.startswith("seconds/") and (not phases or k.split("/")[1] in phases))
        for line in lines
    ]
    return np.cumsum(of_line)


def test_lines_have_all_of_the_time_and_the_goodput_until_then() -> None:
    run = runs.finished_run()
    lines, summary = runs.lines_of(run / "metrics.jsonl"), read_json(run / "summary.json")
    useful, total = cumulated(lines, "sample", "score", "update"), cumulated(lines)
    np.testing.assert_allclose([line["goodput"] for line in lines], useful / total, rtol=1e-2)
    assert all(line["goodput"] <= g for line, g in zip(lines, useful / total, strict=True)), "it is a moment older"
    assert 0 < summary["goodput"] < 1
    spent = summary["seconds"]
    assert {"load", "compile", "checkpoint", "evaluate", "other"} < set(spent)
    assert sum(spent.values()) >= total[-1]
    assert spent["sample"] == pytest.approx(cumulated(lines, "sample")[-1], abs=1e-3)
    share = sum(spent[name] for name in ("sample", "score", "update")) / sum(spent.values())
    assert summary["goodput"] == pytest.approx(share, abs=1e-3)
    # What comes between two lines is in the second: loading, the first evaluation, the checkpoint after two steps.
    assert lines[0]["seconds/load"] > 0 == lines[1]["seconds/load"]
    assert lines[0]["seconds/evaluate"] > 0 == lines[1]["seconds/evaluate"]
    assert lines[2]["seconds/checkpoint"] > 0 == lines[3]["seconds/checkpoint"]


def test_time_that_a_restart_throws_away_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs.finished_run(), run)
    shutil.rmtree(run / "checkpoints" / "4")
    (run / "summary.json").unlink()
    saved = runs.lines_of(run / "checkpoints/2/meta/metadata")[0]
    for name in ("metrics.jsonl", "completions.jsonl"):
        os.utime(run / name, (saved["saved"] + 7, saved["saved"] + 7))
    monkeypatch.setattr(goodput, "time", lambda: saved["saved"] + 60)
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    summary = loop.resume(str(run))
    line = runs.lines_of(run / "metrics.jsonl")[2]
    assert line["seconds/lost"] == pytest.approx(7, abs=1e-3)
    assert line["seconds/down"] == pytest.approx(53, abs=1e-3)
    assert sum(summary["seconds"].values()) > 60 + sum(saved["seconds"].values())
    assert summary["goodput"] < read_json(runs.finished_run() / "summary.json")["goodput"]
    # The run ended by itself: however long ago, nothing is lost by taking it up again.
    again = loop.resume(str(run))
    assert again["seconds"]["down"] == summary["seconds"]["down"]
