"""Kills and damages: a small share of experiments/attack.py, and that its judges notice what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import jax
import pytest

from experiments.attacks import damages, kills, tiny
from experiments.attacks.agents import AGENTS
from experiments.attacks.damage_files import HARMS, UNREADABLE, harm, unreadable
from experiments.attacks.damage_kinds import Kind
from experiments.attacks.worker import Reply, Worker
from jaxrl_llm.cli.config_file import read_config
from jaxrl_llm.training.config.json_text import from_dict

KILLS, DAMAGES = 126, 24  # seeds: Ctrl-C in a step and a kill in a checkpoint; damages of many kinds
GOOD = Reply(0, "resuming from step 4\n", "", 1.0)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[damages.Damaged]:
    """A finished run, and a process which resumes copies of it and shares the compiled programs of all tests."""
    with pytest.MonkeyPatch.context() as patch, Worker() as worker:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(jax.config.jax_compilation_cache_dir))
        yield damages.Damaged("grpo", tmp_path_factory.mktemp("attack") / "grpo", worker)


@pytest.mark.heavy
def test_killed_runs_end_as_those_that_were_not(damaged: damages.Damaged) -> None:
    found = list(islice(damaged.runs.attack(f"{KILLS}"), 2))
    assert [outcome.verdict for outcome in found] == ["clear"] * 2, found


@pytest.mark.heavy
def test_killed_agents_end_as_those_that_were_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They call tools, which answer after a moment, in conversations that go on from step to step."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(jax.config.jax_compilation_cache_dir))
    with Worker() as worker:
        runs = kills.Runs("functions", tmp_path / "functions", worker)
        lines = [json.loads(line) for line in (runs.reference / "metrics.jsonl").read_text().splitlines()]
        assert all(line["rollout/calls"] > 1 for line in lines)
        found = list(islice(runs.attack("0"), 2))
    assert [outcome.verdict for outcome in found] == ["clear"] * 2, found


def test_the_settings_of_agents_are_those_that_were_promised(tmp_path: Path) -> None:
    tiny.write_inputs(tmp_path / "inputs")
    found = [
        from_dict({**read_config(tiny.write_settings(name, tmp_path / "inputs")), "output": "run"}) for name in AGENTS
    ]
    assert sum(bool(config.environment or config.tools) for config in found) > 7
    assert {config.compact.rpartition(":")[2] for config in found if config.compact} == {"SHORT", "LAST"}
    assert sum(config.replay_megabytes == 0 for config in found) == 2
    assert all(config.checkpoint_every == 1 for config in found)


@pytest.mark.heavy
@pytest.mark.parametrize("case", damages.draw(12, DAMAGES, ["grpo"]), ids=lambda case: f"{case.kind.name}, {case.base}")
def test_damaged_runs_go_on_or_say_what_is_wrong(damaged: damages.Damaged, case: damages.Case) -> None:
    found = damaged.attack(case)
    assert found.verdict == "clear", found


@pytest.mark.heavy
def test_every_difference_of_two_runs_is_noticed(damaged: damages.Damaged, tmp_path: Path) -> None:
    reference, run = damaged.runs.reference, tmp_path / "run"
    assert tiny.differences(reference, reference) == ""
    shutil.copytree(reference, run)
    for name in ("metrics.jsonl", "completions.jsonl", "summary.json"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace("0.25", "0.26", 1) if "0.25" in text else text[: text.rindex("{")])
        assert tiny.differences(run, reference).startswith(f"{name}: ")
        (run / name).write_text(text)
    meta = run / "checkpoints/6/meta/metadata"
    value = json.loads(meta.read_text())
    name = next(name for name in value["checksums"] if name != "meta")
    value["checksums"][name] ^= 1
    meta.write_text(json.dumps(value))
    assert tiny.differences(run, reference).startswith(f"checkpoint: /checksums/{name} is ")
    shutil.copy(reference / "checkpoints/6/meta/metadata", meta)
    events = next((run / "tensorboard").iterdir())
    events.write_bytes(events.read_bytes()[:-20])
    assert tiny.differences(run, reference).startswith("tensorboard: ")
    assert tiny.differences(run, reference, without=("tensorboard",)) == ""
    shutil.rmtree(run / "checkpoints/6")
    assert tiny.differences(run, reference).startswith("checkpoint: /newest is 4, not 6")


def test_what_is_lost_is_noticed(tmp_path: Path) -> None:
    names = ("metrics.jsonl", "config.json", "checkpoints/4/data", "checkpoints/2/data", "run.lock")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = damages.contents(tmp_path)
    assert set(before) == set(names[:-1])
    assert damages.lost(before, before, refused=True) == ""
    (tmp_path / "checkpoints/4").rename(tmp_path / "aside")
    moved = damages.contents(tmp_path)
    assert damages.lost(before, moved, refused=True) == ""
    assert damages.lost(before, {**moved, "metrics.jsonl": "other"}, refused=False) == ""
    assert damages.lost(before, {**moved, "metrics.jsonl": "other"}, refused=True) == "metrics.jsonl was changed"
    assert damages.lost(before, {**moved, "config.json": "other"}, refused=False) == "config.json was changed"
    (tmp_path / "aside/data").unlink()
    assert damages.lost(before, damages.contents(tmp_path), refused=False) == "checkpoints/4/data is lost"


REFUSED = Reply(2, "", "WARNING: checkpoint 6 is damaged\nerror: no checkpoint can be used\n", 1.0)


@pytest.mark.parametrize(
    ("refuse", "reply", "gone", "differs", "verdict"),
    [
        ("no", GOOD, "", "", "clear"),
        ("no", GOOD, "", "summary.json: x", "silent"),
        ("no", GOOD._replace(err="WARNING: skipped\n"), "", "summary.json: x", "wrong"),
        ("no", GOOD, "data is lost", "", "wrong"),
        ("no", REFUSED, "", "", "unclear"),
        ("may", REFUSED, "", "", "clear"),
        ("may", REFUSED._replace(err="error: no\nand more\n"), "", "", "unclear"),
        ("may", REFUSED._replace(err="error: it is broken\n"), "", "", "unclear"),
        ("must", REFUSED, "", "", "clear"),
        ("must", GOOD, "", "", "silent"),
        ("must", GOOD._replace(err="WARNING: x\n"), "", "", "wrong"),
        ("may", GOOD._replace(out="the checkpoint is another\n"), "", "metrics.jsonl: x", "clear"),
        ("may", GOOD._replace(status=None), "", "", "hang"),
        ("may", GOOD._replace(status=-11), "", "", "unclear"),
        ("may", GOOD._replace(status=1, err="Traceback (most recent call last):\n"), "", "", "unclear"),
        ("may", GOOD._replace(status=1), "", "", "wrong"),
    ],
)
def test_verdicts_of_damages(refuse: str, reply: Reply, gone: str, differs: str, verdict: str) -> None:
    kind = Kind("by hand", lambda run, rng: "", refuse, names="checkpoint")
    assert damages.judge(kind, reply, gone, differs)[0] == verdict


@pytest.mark.parametrize(
    ("how", "status", "err", "verdict"),
    [
        ("KILL", -9, "", "clear"),
        ("KILL", -9, "Traceback (most recent call last):\nKeyError: 3", "unclear"),
        ("INT", 130, "interrupted; go on with --resume\n", "clear"),
        ("INT", 130, "interrupted\nWARNING: more", "unclear"),
        ("INT INT", 130, "", "unclear"),
        ("INT", 0, "", "wrong"),
        ("INT", None, "", "hang"),
        ("TERM", -15, "", "clear"),
        ("TERM", 75, "stopped by SIGTERM; go on with --resume\n", "clear"),
        ("TERM", 75, "", "unclear"),
        ("TERM", 0, "", "wrong"),
    ],
)
def test_verdicts_of_stopped_processes(how: str, status: int | None, err: str, verdict: str) -> None:
    stopped = kills.Stopped(status, False, False, err)
    assert kills.judge_stop(stopped, how)[0] == verdict
    assert kills.judge_stop(stopped._replace(left=(77,)), how)[0] == "hang"
    complete = verdict if status else "clear"  # it had done all of its work when the signal came
    assert kills.judge_stop(stopped._replace(done=True), how)[0] == (verdict if status is None else complete)


def test_processes_that_outlive_a_killed_run_are_noticed() -> None:
    source = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print('x'); p.wait()"
    )
    process = subprocess.Popen([sys.executable, "-uc", source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "x\n"
    children = kills._children(process.pid)
    process.kill()
    process.wait()
    (left,) = kills._alive(children)
    os.kill(left, signal.SIGKILL)
    while kills._alive(children):
        time.sleep(0.01)


def test_the_same_seed_gives_the_same_attacks_and_all_kinds_come() -> None:
    names = ["grpo", "partial", "lora"]
    first, again = damages.draw(200, 3, names), damages.draw(200, 3, names)
    assert [case[1:] for case in first] == [case[1:] for case in again]
    assert [case.kind.name for case in first] == [case.kind.name for case in again]
    assert {case.kind.name for case in first} == {kind.name for kind in damages.kinds()}
    assert {case.configuration for case in first} == set(names)
    moments = [kills.draw(random.Random(i)) for i in range(200)]
    assert moments == [kills.draw(random.Random(i)) for i in range(200)]
    assert {moment.when for moment in moments} == {"step", "checkpoint", "start", "final", "report"}
    assert {moment.how for moment in moments} == {"KILL", "INT", "INT INT", "TERM"}


@pytest.mark.parametrize("how", HARMS)
def test_every_harm_changes_the_file(tmp_path: Path, how: str) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(bytes(range(1, 101)))
    other.write_bytes(b"other")
    harm(path, how, random.Random(1), other)
    assert path.exists() == (how != "removed")
    if path.exists():
        assert path.read_bytes() != bytes(range(1, 101))
    assert (other.read_bytes() != b"other") == (how == "swapped")


@pytest.mark.parametrize("how", [how for how in UNREADABLE if how != "pipe"])
def test_what_is_unreadable_cannot_be_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"content")
    unreadable(path, how)
    with pytest.raises(OSError):
        path.read_bytes()


@pytest.mark.heavy
def test_a_process_that_hangs_or_dies_is_noticed_and_another_started(tmp_path: Path) -> None:
    with Worker() as worker:
        assert worker.ask(["algorithms", "grpo"], 300).status == 0
        assert worker.ask(["algorithms"], 0.0).status is None
        reply = worker.ask(["no-such-command"], 300)
        assert (reply.status, reply.out) == (2, "")
        assert reply.err.startswith("error: unknown command 'no-such-command'")
