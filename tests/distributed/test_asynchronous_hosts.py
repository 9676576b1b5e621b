"""Sampling beside updates on several processes: each host samples its share with its own clock."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "training"))

import tiny_runs as runs

from experiments.benchmarks.hosts import config_file, free_port, make_inputs, result, run, start, wait
from jaxrl_llm.distributed.peers import KEY

GROUPS, STEPS, BOUND = 4, 6, 2
OPTIONS: dict[str, Any] = {
    "steps": STEPS, "max_staleness": BOUND, "prompts_per_step": GROUPS, "group_size": 2, "eval_size": 0,
    "optimizer": {"learning_rate": 3e-4},
}  # fmt: skip
DAPO = {"algorithm": "dapo", "hyperparameters": {"rounds": 3}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of runs."""
    path = tmp_path_factory.mktemp("asynchronous")
    make_inputs(path)
    return path


def assert_in_time(folder: Path, hosts: int) -> list[list[list[list[int]]]]:
    """The keys of the groups of each step and host: none is too old, and each host takes as many of a step."""
    taken = [line["groups"] for line in runs.lines_of(folder / "order.jsonl")]
    assert len(taken) == STEPS
    for step, groups in enumerate(taken):
        assert len(groups) == hosts
        assert all(len(keys) >= GROUPS // hosts for keys in groups)
        assert all(step - first <= BOUND for keys in groups for _, first, _ in keys)
    for host in range(hosts):
        every = [tuple(key) for groups in taken for key in groups[host]]
        assert len(set(every)) == len(every)
    lines = runs.lines_of(folder / "metrics.jsonl")
    assert [line["rollout/oldest"] <= BOUND for line in lines] == [True] * STEPS
    assert lines[0]["mismatch"] < 1e-4
    assert lines[-1]["rollout/pool"] == 0
    return taken


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("hosts", "more"),
    [(2, {"sampler_devices": 2, "mesh": "fsdp=2", **DAPO}), (2, {}), (4, {})],
    ids=["two, devices apart, replaced groups", "two", "four"],
)
def test_hosts_sample_their_shares_and_their_order_is_repeated(folder: Path, hosts: int, more: dict[str, Any]) -> None:
    name = "-".join([str(hosts), *more])
    first = run(folder, name, hosts, OPTIONS | more)
    taken = assert_in_time(folder / name, hosts)
    # More groups than the steps have: those that were replaced.
    assert (sum(len(keys) for groups in taken for keys in groups) > GROUPS * STEPS) == ("algorithm" in more)
    again = run(folder, f"{name}-again", hosts, {**OPTIONS, **more, "replay_order": str(folder / name)})
    assert again["tokens"] == first["tokens"]
    assert all((x == again["params"][path]).all() for path, x in first["params"].items())


@pytest.mark.heavy
def test_what_hosts_sample_is_drawn_from_the_learners_weights(folder: Path) -> None:
    """With updates too small to matter, log-probabilities are those of the learner in all steps."""
    found = run(folder, "still", 2, {**OPTIONS, "sampler_devices": 2, "optimizer": {"learning_rate": 1e-12}})
    assert all(line["mismatch"] < 1e-4 for line in found["metrics"])
    assert any(line["rollout/stale_tokens"] > 0 for line in found["metrics"])


@pytest.mark.heavy
def test_a_host_is_killed_and_no_group_is_lost(folder: Path) -> None:
    processes = start(["--config", str(config_file(folder, "killed", OPTIONS))], 2, folder)
    deadline = time.monotonic() + 300
    while len(runs.lines_of(folder / "killed/metrics.jsonl")) < 2:
        assert [process.poll() for process in processes] == [None, None]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes[1].kill()
    processes[0].wait(60)
    wait(start(["--resume", str(folder / "killed")], 2, folder), folder)
    taken = assert_in_time(folder / "killed", 2)
    assert sum(len(keys) for groups in taken for keys in groups) == GROUPS * STEPS
    assert len(result(folder, "killed")["metrics"]) == STEPS


@pytest.mark.heavy
@pytest.mark.parametrize("samplers", [1, 2])
def test_samplers_of_several_hosts_are_other_programs(folder: Path, samplers: int, tmp_path: Path) -> None:
    """Two hosts share the parameters, and each has samplers of its own. Their order is repeated bit by bit."""
    found, name = list[dict[str, Any]](), f"apart-{samplers}"
    for again in (False, True):
        port = free_port()  # and the next one, of the second host
        more: dict[str, Any] = {"samplers": samplers, "sampler_address": f"127.0.0.1:{port}", "mesh": "fsdp=4"}
        more |= {"replay_order": str(folder / name)} if again else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY, "of these tests")
            command = [sys.executable, "-m", "jaxrl_llm.cli", "sampler"]
            log = (tmp_path / "samplers.log").open("a")
            ones = [
                subprocess.Popen([*command, f"127.0.0.1:{port + host}"], stdout=log, stderr=log)
                for host in (0, 1)
                for _ in range(samplers)
            ]
            try:
                found.append(run(folder, name + "-again" * again, 2, OPTIONS | more))
            finally:
                for one in ones:
                    one.kill()
                    one.wait()
    assert_in_time(folder / name, 2)
    entered = [line["entered"] for line in runs.lines_of(folder / name / "order.jsonl")]
    assert all(len(turns) == 2 * samplers for turns in entered)
    assert found[0]["tokens"] == found[1]["tokens"]
    assert all((x == found[1]["params"][path]).all() for path, x in found[0]["params"].items())


@pytest.mark.heavy
def test_hosts_that_cannot_share_are_refused(folder: Path) -> None:
    for name, more, words in (
        ("odd", {"prompts_per_step": 3, "group_size": 4}, "gives each of 2 hosts as many groups"),
        ("apart", {"sampler_devices": 1}, "each of 2 hosts samples on as many: give a multiple"),
        ("together", {"mesh": "tensor=4"}, "needs hosts that sample alone"),
    ):
        processes = start(["--config", str(config_file(folder, name, OPTIONS | more))], 2, folder)
        assert [process.wait(120) for process in processes] == [2, 2]
        assert words in (folder / "host0.log").read_text()
        assert not (folder / name).exists()
