"""What a laboratory writes: tables by hand-made outcomes, figures, a folder that goes on, and the command line."""

from __future__ import annotations

import json
import math
import os
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.cli import lab as lab_command
from jaxrl_llm.cli.program import main
from jaxrl_llm.in_jax.lab import laboratory
from jaxrl_llm.in_jax.lab.config import WARM_STEPS, LabConfig
from jaxrl_llm.in_jax.lab.laboratory import check_config, run_lab
from jaxrl_llm.in_jax.lab.outcome import (
    Measuring,
    RunOutcome,
    curves_of,
    from_json,
    measure,
    overall,
    overall_table,
    task_table,
    to_json,
)
from jaxrl_llm.in_jax.lab.results import MOST_CURVES, chosen, coinciding, read_results, write_results
from jaxrl_llm.in_jax.settings import LabSettings
from jaxrl_llm.in_jax.tasks import TASKS
from jaxrl_llm.utils.errors import InputError, InputErrors

TINY = LabSettings(iterations=3, prompts=2, group_size=2, hidden=8, layers=1, heads=1)
CONFIG = LabConfig(("reinforce",), ("sequence_lock",), seeds=2, settings=TINY, warm_steps=2)
START = {"rewards": {"reward": 0.25, "exact": 0.125}, "best": 1.0, "threshold": 0.625, "steps": 5}


def outcome(task: str, method: str, final: list[float], **others: Any) -> RunOutcome:
    """An outcome with these final rewards, and otherwise with plain numbers."""
    runs = len(final)
    measures = {
        "final": np.array(final),
        "pass@1": np.full(runs, 0.5),
        "pass@16": np.full(runs, 0.75),
        "entropy": np.full(runs, 1.25),
        "length": np.full(runs, 3.0),
        "area": np.full(runs, 0.4),
        "steps": np.array([10.0, math.inf, 30.0, 20.0])[:runs],
        "collapsed": np.array([1.0, 0.0, 0.0, 0.0])[:runs],
    }
    line = {"iteration": [1.0, 2.0], "mean": [0.2, final[0]], "low": [0.1, final[0]], "high": [0.3, final[0]]}
    seconds = {"compile": 8.0, "run": 20.0}
    return RunOutcome(task, method, {}, measures, {"reward": line}, seconds)._replace(**others)


def test_a_table_of_one_task() -> None:
    found = [
        outcome("addition", "grpo", [0.5, 0.5, 0.5, 0.5]),
        outcome("addition", "rloo", [0.4, 0.5, 0.6, 0.9], note="without x"),
        outcome("addition", "bad", [0.0], measures={}, error="bad needs y"),
    ]
    header, _, grpo, rloo, bad = task_table(found, "grpo", 0.625).splitlines()
    assert "pass@16 | entropy | area | steps to 0.62 | collapsed | P(better than grpo)" in header
    assert grpo == (
        "| grpo | 0.500 (0.500 to 0.500) | 0.500 | 0.750 | 1.25 | 0.400 | 30 (3 of 4) | 1 of 4 | - | 8, 20 |  |"
    )
    cells = [cell.strip() for cell in rloo.strip("|").split("|")]
    assert cells[1].startswith("0.600 (0.4")
    # One run below, one equal, two above each of grpo's: (0 + 0.5 + 1 + 1) / 4.
    assert cells[8].startswith("0.625 (")
    assert cells[10] == "without x"
    assert bad.endswith(" bad needs y |")
    assert len({line.count("|") for line in (header, grpo, rloo, bad)}) == 1


def test_methods_that_coincide() -> None:
    found = [
        outcome("addition", "grpo", [0.5, 0.5]),
        outcome("addition", "rloo", [0.4, 0.5]),
        outcome("addition", "dapo", [0.5, 0.5]),
        outcome("addition", "late", [0.5, 0.5], curves={"reward": {"iteration": [1.0], "mean": [0.1]}}),
        outcome("addition", "bad", [0.5, 0.5], error="bad needs y"),
    ]
    assert coinciding(found) == [["grpo", "dapo"]]
    assert coinciding(found[:2]) == []


def two_tasks(methods: int) -> list[RunOutcome]:
    """Outcomes of methods m0, m1 ..., each better than the one before, on two tasks."""
    return [
        outcome(task, f"m{number}", [0.01 * number + shift, 0.01 * number + shift])
        for task, shift in (("addition", 0.0), ("maze", 0.5))
        for number in range(methods)
    ]


def test_all_tasks_together() -> None:
    found = [*two_tasks(2), outcome("maze", "partly", [1.0])]
    (best, iqm, better), (second, _, none) = overall(found, ["addition", "maze"], "m0")
    assert (best, second) == ("m1", "m0")  # and not the one that has runs of one task only
    assert iqm.value == pytest.approx((0.01 + 0.51) / 2)  # of four runs the middle two
    assert (better.value, better.low, better.high) == (1.0, 1.0, 1.0)
    assert math.isnan(none.value)
    assert "| m0 | 0.250 (0.250 to 0.250) | - |" in overall_table(found, ["addition", "maze"], "m0")


def test_curves_of_many_methods_are_of_the_baseline_the_best_and_the_worst() -> None:
    tasks = ["addition", "maze"]
    assert chosen(two_tasks(3), tasks, "m0") == ["m2", "m1", "m0"]
    assert chosen(two_tasks(20), tasks, "m10") == ["m10", "m19", "m18", "m17", "m16", "m2", "m1", "m0"]
    assert len(chosen(two_tasks(20), tasks, "another")) == MOST_CURVES


def test_files_hold_what_was_found(tmp_path: Path) -> None:
    config = LabConfig(("m0", "m1", "m2"), ("addition", "maze"))
    starts, found = {"addition": START, "maze": START}, two_tasks(3)
    write_results(tmp_path, config, starts, found)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {"results.json", "RESULTS.md", "curves.svg", "finals.svg"}
    write_results(tmp_path, config, starts, found)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    for name, lines in (("curves.svg", 2 * 3), ("finals.svg", 0)):
        text = first[name].decode()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert text.count("FillBetweenPolyCollection") == lines
    page = first["RESULTS.md"].decode()
    assert "1 gradient step for each batch" in page
    assert page.index("## All tasks") < page.index("## addition") < page.index("## maze") < page.index("cannot tell")
    assert "after 5 supervised steps reward 0.250, exact 0.125" in page
    again, outcomes = read_results(tmp_path, config)
    assert again == starts
    for mine, theirs in zip(outcomes, found, strict=True):
        assert mine._replace(measures={}) == theirs._replace(measures={})
        for name in theirs.measures:
            np.testing.assert_array_equal(mine.measures[name], theirs.measures[name])


def test_numbers_that_are_not_finite_are_null() -> None:
    found = outcome("addition", "grpo", [0.5, 0.5])
    text = json.dumps(to_json(found), allow_nan=False)
    assert json.loads(text)["measures"]["steps"] == [10.0, None]
    assert from_json(json.loads(text)).measures["steps"][1] == math.inf


def test_measures_of_runs_by_hand() -> None:
    rewards = np.zeros((2, 1, 4))
    rewards[1, 0] = [1.0, 1.0, 0.0, 0.0]
    metrics = {
        "reward": np.array([[0.2, 0.8, 0.6], [0.0, 0.4, 0.1]]),
        "entropy": np.array([[3.0, 2.0, 1.0], [3.0, 0.0, 0.0]]),
        "length": np.full((2, 3), 4.0),
    }
    how = Measuring(TASKS["sequence_lock"](), threshold=0.7, window=2)
    found = measure(metrics, rewards, rewards, how)
    assert found["final"].tolist() == [0.0, 0.5]
    assert found["pass@2"].tolist() == [0.0, pytest.approx(1 - 1 / 6)]  # of six pairs one holds no right one
    assert found["pass@4"].tolist() == [0.0, 1.0]
    assert found["entropy"].tolist() == [1.5, 0.0]
    assert found["steps"].tolist() == [3.0, math.inf]
    assert found["collapsed"].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(found["area"], [0.6, 0.225])
    curve = curves_of(metrics)["reward"]
    assert curve["mean"] == [0.1, 0.6, 0.35]
    assert all(low <= mean <= high for low, mean, high in zip(curve["low"], curve["mean"], curve["high"], strict=True))


@pytest.mark.heavy
def test_a_laboratory_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    (found,) = run_lab(CONFIG, tmp_path, said.append, jax.devices()[:1])
    assert [line.split(":")[0] for line in said] == ["sequence_lock", "sequence_lock reinforce"]
    assert found.measures["final"].shape == (2,)
    assert "| reinforce | " in (tmp_path / "RESULTS.md").read_text()

    def another(method: str, *_: Any) -> list[RunOutcome]:
        return [outcome("sequence_lock", method, [0.5, 0.5])]

    monkeypatch.setattr(laboratory, "run_method", another)
    more = replace(CONFIG, algorithms=("reinforce", "rloo"))
    first, second = run_lab(more, tmp_path, said.append, jax.devices()[:1])
    np.testing.assert_allclose(first.measures["final"], found.measures["final"], rtol=1e-5)
    assert second.method == "rloo"
    with pytest.raises(InputError, match=r"holds results with seeds 2, and not 3: choose another --output"):
        run_lab(replace(CONFIG, seeds=3), tmp_path, said.append)
    with pytest.raises(InputError, match="first_seed 0, and not 2"):
        run_lab(replace(CONFIG, first_seed=2), tmp_path, said.append)
    value = json.loads((tmp_path / "results.json").read_text())
    del value["settings"]["first_seed"]  # as older folders are
    (tmp_path / "results.json").write_text(json.dumps(value))
    assert len(run_lab(more, tmp_path, said.append, jax.devices()[:1])) == 2
    (tmp_path / "results.json").write_text('{"loss": 1}')
    with pytest.raises(InputError, match="not written by jaxrl lab"):
        run_lab(CONFIG, tmp_path, said.append)


def test_all_mistakes_are_told_before_anything_is_compiled() -> None:
    config = replace(CONFIG, tasks=("addtion", "maze"), grid={"clip_high": (0.1,)}, baseline="grpo")
    with pytest.raises(InputErrors) as caught:
        check_config(config)
    text = str(caught.value)
    assert "did you mean 'addition'" in text
    assert "clip_high" in text
    assert "baseline among the algorithms 'grpo'" in text
    with pytest.raises(InputError, match="did you mean 'grpo'"):
        check_config(replace(CONFIG, algorithms=("gropo",)))
    for wrong in ({"seeds": 0}, {"first_seed": -1}):
        with pytest.raises(InputError, match="seed"):
            replace(CONFIG, **wrong)


def test_every_task_has_a_start_and_is_known_to_the_command_line() -> None:
    assert set(WARM_STEPS) == set(TASKS)
    assert tuple(TASKS) == lab_command.TASK_NAMES


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[LabConfig] = []

    def record(config: LabConfig, folder: Path, say: Any) -> list[RunOutcome]:
        seen.append(config)
        return [outcome("addition", "grpo", [0.5])]

    monkeypatch.setattr(laboratory, "run_lab", record)
    folder = str(tmp_path / "lab")
    arguments = ["lab", "--output", folder, "--algorithms", "grpo", "dapo", "--tasks", "all", "--seeds", "4"]
    first = ["--first-seed", "9"]
    assert (
        main([*arguments, "--grid", "learning_rate=1e-3,3e-3", "--iterations", "7", "--baseline", "dapo", *first]) == 0
    )
    assert f"results: {folder}/RESULTS.md" in capsys.readouterr().out
    (config,) = seen
    assert config.algorithms == ("grpo", "dapo")
    assert config.tasks == tuple(TASKS)
    assert config.grid == {"learning_rate": (1e-3, 3e-3)}
    assert (config.seeds, config.settings.iterations, config.compared_with) == (4, 7, "dapo")
    assert config.first_seed == 9
    mistakes = ["--seeds", "0", "--first-seed", "-1", "--algorithms", "gropo", "grpo", "--tasks", "mase"]
    assert main(["lab", "--output", str(tmp_path / "no" / "such"), *mistakes]) == 2
    complaint = capsys.readouterr().err
    assert "did you mean 'grpo'" in complaint
    assert "did you mean 'maze'" in complaint
    assert "--seeds is 0" in complaint
    assert "--first-seed is -1" in complaint
    assert "no/such" in complaint
    assert main([*arguments, "--grid", "clip_low"]) == 2
    assert "clip_low=0.1,0.2" in capsys.readouterr().err


def test_the_command_line_takes_algorithms_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[LabConfig] = []

    def record(config: LabConfig, folder: Path, say: Any) -> list[RunOutcome]:
        check_config(config)
        seen.append(config)
        return [outcome("addition", "grpo", [0.5])]

    monkeypatch.setattr(laboratory, "run_lab", record)
    (tmp_path / "own.py").write_text(
        "from jaxrl_llm.algorithms import Algorithm, get\n\n"
        "def mine(clip_high: float = 0.28) -> Algorithm:\n    return get('dapo', clip_high=clip_high)\n\n"
        "value = mine()\n"
    )
    mine, value = f"{tmp_path}/own.py:mine", f"{tmp_path}/own.py:value"
    arguments = ["lab", "--output", str(tmp_path / "lab"), "--tasks", "addition", "--algorithms", "reinforce", mine]
    assert main([*arguments, value, "--grid", "clip_high=0.2,0.4", "--baseline", mine]) == 0
    (config,) = seen
    assert config.algorithms == ("reinforce", mine, value)
    assert config.compared_with == mine
    capsys.readouterr()
    assert main([*arguments, f"{tmp_path}/own.py:mini", f"{tmp_path}/absent.py:mine"]) == 2
    complaint = capsys.readouterr().err
    assert "'mini': did you mean 'mine'?" in complaint
    assert "absent.py" in complaint
    assert len(seen) == 1


@pytest.mark.heavy
def test_an_algorithm_in_a_file_runs_as_it_does_by_name(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from jaxrl_llm.algorithms import get\n\nvalue = get('reinforce')\n")
    config = replace(CONFIG, algorithms=("reinforce", f"{tmp_path}/own.py:value"))
    by_name, in_file = run_lab(config, tmp_path / "lab", lambda _: None, jax.devices()[:1])
    assert not in_file.error
    assert in_file.method == f"{tmp_path}/own.py:value"
    np.testing.assert_array_equal(in_file.measures["final"], by_name.measures["final"])


def test_runs_are_spread_over_cores_where_jax_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--some_flag=1")
    lab_command._spread_over_cores(8)
    assert os.environ["XLA_FLAGS"] == "--some_flag=1"  # JAX has begun
    monkeypatch.delitem(sys.modules, "jax")
    lab_command._spread_over_cores(1)
    assert os.environ["XLA_FLAGS"] == "--some_flag=1"
    lab_command._spread_over_cores(8)
    told = "--some_flag=1 --xla_force_host_platform_device_count=6 --xla_cpu_multi_thread_eigen=false"
    assert os.environ["XLA_FLAGS"] == told
    lab_command._spread_over_cores(4)  # as the user has told
    assert os.environ["XLA_FLAGS"] == told
    monkeypatch.delenv("XLA_FLAGS")
    lab_command._spread_over_cores(4)
    assert os.environ["XLA_FLAGS"].startswith("--xla_force_host_platform_device_count=4 ")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"algorithms": ("grpo", "grpo")}, "algorithms names grpo twice"),
        ({"tasks": ("addition", "addition")}, "tasks names addition twice"),
        ({"algorithms": ("grpo",), "grid": {"clip_low": (0.2, -1.0)}}, "clip.low.* is -1"),
        ({"grid": {"learning_rate": (-1.0,)}}, "learning_rate is -1"),
        ({"grid": {"learnin_rate": (0.1,)}}, "hyper-parameter of --grid 'learnin_rate': did you mean 'learning_rate'"),
        ({"grid": {"learning_rate": (math.nan,)}}, "learning_rate.* is nan"),
        ({"tasks": "addition"}, "tasks of LabConfig is 'addition', but must be a list"),
    ],
)
def test_what_no_method_can_run_is_refused_before_anything_is_compiled(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_config(replace(CONFIG, **changed))


def test_a_point_that_one_method_alone_refuses_is_left_to_its_outcome() -> None:
    check_config(replace(CONFIG, algorithms=("grpo", "reinforce"), grid={"clip_low": (-1.0,)}))
