"""Whole runs on two processes: the same tokens and parameters as on one; and one of them killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "training"))

import tiny_runs as runs

from experiments.benchmarks.hosts import CASES, compare, config_file, make_inputs, result, run, start, wait
from jaxrl_llm.distributed.alive import LOST

PATIENCE = 300.0  # seconds until something must have happened

# A group more on one host than on the other, of more groups than a step takes, split over all devices.
OPTIONS: dict[str, Any] = {"steps": 4, **CASES["ragged"], **CASES["oversample"]}
QUICK = {"algorithm": "dr_grpo", "steps": 2, "eval_size": 0, "oversample": 1.0, "remat": False}  # few programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of runs."""
    path = tmp_path_factory.mktemp("hosts")
    make_inputs(path)
    return path


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, Any]:
    """An unbroken run on two hosts."""
    return run(folder, "two", 2, OPTIONS)


def assert_same(found: dict[str, Any], one: dict[str, Any]) -> None:
    """Tokens, parameters and metrics."""
    same, apart = compare(found, one)
    assert same
    assert apart < 1e-5
    for line, other in zip(found["metrics"], one["metrics"], strict=True):
        for name in ("reward/mean", "completion/length", "signal", "groups/uniform"):
            assert line[name] == pytest.approx(other[name], abs=1e-6), name


@pytest.mark.heavy
def test_a_run_on_two_hosts_is_that_on_one(folder: Path, on_two: dict[str, Any]) -> None:
    assert_same(on_two, run(folder, "one", 1, OPTIONS))


@pytest.mark.heavy
def test_two_hosts_in_lock_step_are_one(folder: Path) -> None:
    options = CASES["lockstep"] | QUICK
    found, one = (run(folder, f"lockstep{hosts}", hosts, options) for hosts in (2, 1))
    assert_same(found, one)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["xrpo", "pav"])
def test_programs_that_meet_and_a_second_policy_on_two_hosts(folder: Path, name: str) -> None:
    """The hosts sample apart: what one brings to a meeting changes how many samples the other draws."""
    options = {**QUICK, **CASES["ragged"], "algorithm": name, "oversample": 1.0, "steps": 2}
    assert_same(*(run(folder, f"{name}{hosts}", hosts, options) for hosts in (2, 1)))


@pytest.mark.heavy
def test_a_host_that_is_killed_ends_the_other_and_the_run_goes_on(folder: Path, on_two: dict[str, Any]) -> None:
    name = "killed"
    processes = start(["--config", str(config_file(folder, name, OPTIONS))], 2, folder)
    deadline = time.monotonic() + PATIENCE
    while not runs.lines_of(folder / name / "metrics.jsonl"):
        assert [process.poll() for process in processes] == [None, None]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes[0].kill()
    assert processes[1].wait(60) == LOST
    said = (folder / "host1.log").read_text()
    assert "host 0 has shown no sign of life" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert len(runs.lines_of(folder / name / "metrics.jsonl")) < OPTIONS["steps"]
    wait(start(["--resume", str(folder / name)], 2, folder), folder)
    found = result(folder, name)
    assert found["tokens"] == on_two["tokens"]
    assert all((x == found["params"][name]).all() for name, x in on_two["params"].items())


@pytest.mark.heavy
def test_hosts_that_see_other_prompts_end_with_the_same_line(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(lines[:-1]))
    arguments = ["--config", str(config_file(tmp_path, "run", {}))]
    processes = start(arguments, 2, tmp_path, of_last=["--prompts", str(tmp_path / "other.jsonl")])
    assert [process.wait(120) for process in processes] == [2, 2]
    for host in range(2):
        said = (tmp_path / f"host{host}.log").read_text()
        assert "hosts 0 and 1 differ in the held-out prompts: all hosts need the same settings, files" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
