"""`Run` reads what a run wrote."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_runs as runs

import jaxrl_llm
from jaxrl_llm import InputError, Run, TrainConfig


@pytest.fixture
def run() -> Run:
    return Run(runs.finished_run())


def test_it_has_what_the_files_say(run: Run) -> None:
    lines = runs.lines_of(run.path / "metrics.jsonl")
    metrics = run.metrics
    assert set(metrics) == {name for line in lines for name in line}
    assert metrics["step"].tolist() == [1, 2, 3, 4]
    assert metrics["reward/mean"].tolist() == [line["reward/mean"] for line in lines]
    assert all(values.shape == (4,) for values in metrics.values())
    logged = runs.lines_of(run.path / "completions.jsonl")
    assert [row["completion"] for row in run.completions] == ["".join(line["tokens"]) for line in logged]
    assert {row["phase"] for row in run.completions} == {"eval_before", "train", "eval_after"}
    assert run.summary == json.loads((run.path / "summary.json").read_text())
    assert isinstance(run.config, TrainConfig)
    assert run.config.steps == 4


def test_it_says_itself_in_a_line(run: Run) -> None:
    accuracy = [f"{100 * run.summary[name]['accuracy']:.1f} %" for name in ("eval_before", "eval_after")]
    assert repr(run) == (
        f"Run({str(run.path)!r}: grpo on {runs.MODEL}, 4 of 4 steps, accuracy {accuracy[0]} before, "
        f"accuracy {accuracy[1]} after)"
    )


def test_its_policy_is_the_trained_one(run: Run) -> None:
    policy, params, tokenizer = run.policy()
    runs.assert_equal_trees(params, runs.final_params(run.path))
    assert policy.tokenizer is tokenizer


def test_curves(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = run.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "reward/mean"
    assert len(titles) == len(set(titles)) >= 5
    assert figure._repr_png_().startswith(b"\x89PNG")  # as a notebook shows it
    drawn = run.plot("entropy").axes[0].lines[0]
    assert drawn.get_xdata().tolist() == [1, 2, 3, 4]
    assert drawn.get_ydata().tolist() == run.metrics["entropy"].tolist()
    with pytest.raises(InputError, match="unknown metric 'entropi': did you mean 'entropy'"):
        run.plot("entropi")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"drawing curves needs the package 'matplotlib': pip install"):
        run.plot()


def test_a_run_that_goes_on_is_read_as_it_is(tmp_path: Path) -> None:
    shutil.copytree(runs.finished_run(), tmp_path / "run")
    run, file = Run(tmp_path / "run"), tmp_path / "run/metrics.jsonl"
    whole = file.read_text()
    for name in ("metrics.jsonl", "completions.jsonl", "summary.json"):
        (tmp_path / "run" / name).unlink()
    assert (run.metrics, run.completions, run.summary) == ({}, [], {})
    assert "0 of 4 steps" in repr(run)
    with pytest.raises(InputError, match="has no metrics yet"):
        run.plot()
    first, second = whole.splitlines(keepends=True)[:2]
    without = {name: value for name, value in json.loads(second).items() if name != "entropy"}
    file.write_text(first + json.dumps(without) + "\n" + second[:20])  # and the line that is being written
    assert run.metrics["step"].tolist() == [1, 2]
    assert np.isnan(run.metrics["entropy"]).tolist() == [False, True]
    assert "2 of 4 steps" in repr(run)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        Run(tmp_path)
    assert jaxrl_llm.Run is Run
