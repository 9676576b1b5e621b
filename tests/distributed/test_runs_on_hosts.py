"""Whole runs on two processes: the same tokens and parameters as on one; and one of them killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.benchmarks.hosts import CASES, compare, killed, make_inputs, result, run, start, wait

QUICK = {"algorithm": "dr_grpo", "steps": 2, "eval_size": 0, "oversample": 1.0, "remat": False}  # few programs


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["ragged", "oversample", "lockstep"])
def test_a_run_on_two_hosts_is_that_on_one(case: str, tmp_path: Path) -> None:
    make_inputs(tmp_path)
    options = CASES[case] | (QUICK if case == "lockstep" else {})
    one, found = (run(tmp_path, f"{hosts}", hosts, options) for hosts in (1, 2))
    same, apart = compare(found, one)
    assert same
    assert apart < 1e-5
    for line, other in zip(found["metrics"], one["metrics"], strict=True):
        for name in ("reward/mean", "completion/length", "signal", "groups/uniform"):
            assert line[name] == pytest.approx(other[name], abs=1e-6), name


@pytest.mark.heavy
def test_a_host_that_is_killed_ends_the_other_and_the_run_goes_on(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    options = {"steps": 4, "oversample": 1.5}
    whole = run(tmp_path, "whole", 2, options)
    took, said = killed(tmp_path, "killed", options, 15.0, 0)
    assert took < 60
    assert "host 0 has shown no sign of life" in said or "done before" in said
    wait(start(["--resume", str(tmp_path / "killed")], 2, tmp_path), tmp_path)
    found = result(tmp_path, "killed")
    assert found["tokens"] == whole["tokens"]
    assert all((x == found["params"][name]).all() for name, x in whole["params"].items())
