"""SIGTERM: the steps taken are saved, the process ends with status 75, and the run goes on as if it had not stopped."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs
from heavy import few

from experiments.benchmarks import hosts
from jaxrl_llm.cli.program import main
from jaxrl_llm.learner import step as learner
from jaxrl_llm.training import begin, loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder, has_begun
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import PREEMPTED, Preempted, interruptible, preemptible, stop_if

PATIENCE = 300.0  # seconds until something must have happened


def preempt_in_rollout(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """SIGTERM while step `at`, counted from 0, is being sampled."""
    inner = begin.source_of

    def source_of(*arguments: Any) -> Any:
        source = inner(*arguments)

        def following(state: Any, params: Any, key: Any, step: int) -> Any:
            if step == at:
                signal.raise_signal(signal.SIGTERM)
            return source.next(state, params, key, step)

        return source._replace(next=following)

    monkeypatch.setattr(begin, "source_of", source_of)


def preempt_in_update(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """SIGTERM while step `at` learns, twice: once from the launcher, once from the scheduler."""
    inner, calls = learner.prepare, []

    def prepare(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == at + 1:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return inner(*arguments)

    monkeypatch.setattr(learner, "prepare", prepare)


def assert_like_finished(run: Path) -> None:
    """The run is that of `runs.finished_run`, bit by bit."""
    reference = runs.finished_run()
    runs.assert_equal_trees(runs.final_params(run), runs.final_params(reference))
    assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(reference / "metrics.jsonl")
    assert (run / "completions.jsonl").read_bytes() == (reference / "completions.jsonl").read_bytes()


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


CASES = [
    (preempt_in_rollout, 3, 3),  # left: the three steps before it are saved
    (preempt_in_update, 2, 3),  # finished
    (preempt_in_update, 1, 2),  # finished, and saved anyway
    (preempt_in_rollout, 0, 0),  # nothing to save
]


@pytest.mark.parametrize(("preempt", "at", "steps"), few(CASES, [CASES[1]], unpack=True))
def test_the_steps_taken_are_saved_and_the_run_goes_on(
    tmp_path: Path, preempt: Callable[..., None], at: int, steps: int
) -> None:
    config = runs.small_config(tmp_path)
    run, handler = Path(config.output), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        preempt(patch, at)
        with pytest.raises(Preempted):
            runs.train(config)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert saved(run) == [str(step) for step in (2, 3) if step <= steps]
    assert len(runs.lines_of(run / "metrics.jsonl")) == steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_report", lambda folder: folder)
        loop.resume(str(run))
    assert_like_finished(run)


def test_the_command_ends_with_its_own_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with --resume auto the same command begins a run, goes on with it, and finishes it."""
    preempt_in_rollout(monkeypatch, 3)
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    config = runs.small_config(tmp_path)
    command = ["train", "--resume", "auto", *runs.as_arguments(config)]
    assert main(command) == PREEMPTED
    error = capsys.readouterr().err
    assert "stopped by SIGTERM, the steps taken are saved: resume with jaxrl train --resume RUN" in error
    monkeypatch.undo()
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    assert main(command) in (0, 1)
    assert "resuming from step 3" in capsys.readouterr().out
    assert_like_finished(Path(config.output))


def test_a_run_is_gone_on_with_only_under_its_own_settings(tmp_path: Path) -> None:
    shutil.copytree(runs.finished_run(), tmp_path / "run")
    config = dataclasses.replace(RunFolder(tmp_path / "run").read_config())
    assert has_begun(config, accept=False)
    assert has_begun(dataclasses.replace(config, steps=9, mesh="data=1"), accept=False)
    other = dataclasses.replace(config, temperature=0.5)
    with pytest.raises(InputError, match=r"temperature was 1.0, and is now 0.5"):
        has_begun(other, accept=False)
    assert has_begun(other, accept=True)
    assert not has_begun(dataclasses.replace(config, output=str(tmp_path / "none")), accept=False)


def test_sigterm_is_one_flag_for_all_contexts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with preemptible() as terminated, interruptible() as interrupted:
        assert not terminated()
        with preemptible(leave=False) as inner:
            signal.raise_signal(signal.SIGTERM)
            assert terminated()
            assert inner()
            assert not interrupted(), "the step at hand is finished"
        assert interrupted()
        with pytest.raises(Preempted):
            stop_if(interrupted())
    assert signal.getsignal(signal.SIGTERM) is before
    with preemptible() as terminated:
        assert not terminated()


def test_an_own_handler_survives_that_of_jax_distributed() -> None:
    """`jax.distributed.initialize` sets a handler of SIGTERM; what `preemptible` sets within it counts."""
    with preemptible() as terminated:
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        with preemptible():
            signal.raise_signal(signal.SIGTERM)
        assert terminated()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.heavy
def test_a_process_saves_and_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    config: TrainConfig = runs.small_config(tmp_path, checkpoint_every=0)
    run = Path(config.output)
    command = ["train", "--resume", "auto", *runs.as_arguments(config)]
    process = runs.start(*command, REWARD_SECONDS="0.6")
    deadline = time.monotonic() + PATIENCE
    while not runs.lines_of(run / "metrics.jsonl"):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == PREEMPTED, errors
    assert errors.splitlines() == [
        "stopped by SIGTERM, the steps taken are saved: resume with jaxrl train --resume RUN"
    ]
    steps = len(runs.lines_of(run / "metrics.jsonl"))
    assert saved(run) == [str(steps)]
    again = runs.start(*command)
    out, errors = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, errors
    assert f"resuming from step {steps}" in out
    assert_like_finished(run)


@pytest.mark.heavy
def test_one_of_two_hosts_is_told_and_one_process_goes_on(tmp_path: Path) -> None:
    """Both hosts finish the step, save together and end with status 75; one process with their devices goes on."""
    hosts.make_inputs(tmp_path)
    options = {"steps": 4, "checkpoint_every": 0, "eval_size": 0, "mesh": "data=2,fsdp=2"}
    one = hosts.run(tmp_path, "one", 1, options)
    run = tmp_path / "two"
    processes = hosts.start(["--config", str(hosts.config_file(tmp_path, "two", options))], 2, tmp_path)
    deadline = time.monotonic() + PATIENCE
    while not runs.lines_of(run / "metrics.jsonl"):
        assert processes[0].poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(PATIENCE) for process in processes] == [PREEMPTED, PREEMPTED]
    steps = len(runs.lines_of(run / "metrics.jsonl"))
    assert saved(run) == [str(steps)]
    hosts.wait(hosts.start(["--resume", str(run)], 1, tmp_path), tmp_path)
    found = hosts.result(tmp_path, "two")
    same, apart = hosts.compare(found, one)
    assert same
    assert apart < 1e-5


TOLD = """
import os, signal
from jaxrl_llm.training import setup
load = setup.load_model
def load_model(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return load(*arguments)
setup.load_model = load_model
"""


@pytest.mark.heavy
def test_one_of_two_hosts_is_told_while_they_set_up(tmp_path: Path) -> None:
    hosts.make_inputs(tmp_path)
    config, port = hosts.config_file(tmp_path, "run", {}), hosts.free_port()
    processes = [
        runs.start(
            "train", "--config", str(config), "--coordinator", f"localhost:{port}", "--processes", "2", "--process",
            str(index), code=TOLD * index,
        )
        for index in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [PREEMPTED, PREEMPTED], ended
    assert not (tmp_path / "run").exists()
