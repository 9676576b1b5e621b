"""A run that is killed at any moment and resumed ends like one that was not killed."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs
from heavy import few

from jaxrl_llm.learner import step as learner
from jaxrl_llm.reporting.logging.files import read_json
from jaxrl_llm.training import journal, loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.folder.lock import locked
from jaxrl_llm.utils.errors import InputError

STEPS = 6
DELAY = 0.6  # seconds that the reward takes in a process that is to be killed, or the steps would be over too soon
PATIENCE = 300.0  # seconds until something must have happened


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The configuration of a finished run with an evaluation on the way."""
    config = runs.small_config(tmp_path_factory.mktemp("unbroken"), steps=STEPS, eval_every=3, keep_checkpoints=3)
    runs.train(config)
    return config


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict]:
    """Goes on with a run in this process."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    return lambda folder: loop.resume(str(folder))


def kill(process: subprocess.Popen[str], when: Callable[[], bool], delay: float = 0.0) -> None:
    """Kill the process `delay` seconds after something has happened; it must not have ended before."""
    deadline = time.monotonic() + PATIENCE
    while not when():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -9, errors


def assert_same_run(run: Path, other: Path) -> None:
    """Equal parameters and records, bit by bit."""
    runs.assert_equal_trees(runs.final_params(run), runs.final_params(other))
    assert_same_records(run, other)


def assert_same_records(run: Path, other: Path) -> None:
    """Equal checksums of the last checkpoint, and equal records."""
    last = max(int(path.name) for path in (other / "checkpoints").iterdir() if path.name.isdecimal())
    sums = [runs.lines_of(folder / f"checkpoints/{last}/meta/metadata")[0]["checksums"] for folder in (run, other)]
    for one in sums:
        del one["meta"]  # it holds seconds
    assert sums[0] == sums[1]
    assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(other / "metrics.jsonl")
    assert (run / "completions.jsonl").read_bytes() == (other / "completions.jsonl").read_bytes()
    summaries = [read_json(folder / "summary.json") for folder in (run, other)]
    for summary in summaries:
        assert set(summary.pop("seconds")) >= {"sample", "score", "update"}
        assert 0 < summary.pop("goodput") < 1
    assert summaries[0] == summaries[1]


@pytest.mark.heavy
def test_a_run_that_is_killed_three_times_ends_as_if_it_was_not(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict]
) -> None:
    """Killed before the first checkpoint, in the middle of a step, and while a checkpoint is being written."""
    moments = random.Random(20)
    run = tmp_path / "run"
    slow = {"REWARD_SECONDS": str(DELAY)}

    def steps_done() -> int:
        path = run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saved() -> list[str]:
        return sorted(path.name for path in (run / "checkpoints").glob("*"))

    config = TrainConfig(**{**vars(unbroken), "output": str(run)})
    first = runs.start("train", *runs.as_arguments(config), **slow)
    kill(first, lambda: steps_done() >= 1, delay=moments.uniform(0, 0.5 * DELAY))
    assert saved() == []
    assert 1 <= steps_done() < 2

    second = runs.start("train", "--resume", str(run), **slow)
    kill(second, lambda: saved() == ["2"] and steps_done() == 3, delay=moments.uniform(0, 0.5 * DELAY))
    assert saved() == ["2"]
    assert steps_done() == 3

    third = runs.start("train", "--resume", str(run), **slow)
    kill(third, lambda: any("tmp" in name for name in saved()))

    resumed(run)
    assert_same_run(run, Path(unbroken.output))


@pytest.mark.heavy
@pytest.mark.parametrize("step", few([0, 2, 4, 6], [2]))
def test_the_stream_of_prompts_and_all_else_goes_on_from_each_checkpoint(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict], step: int
) -> None:
    """The folder as a killed process leaves it: checkpoints up to `step`, lines of later steps, half a line."""
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    for later in range(step + 2, STEPS + 1, 2):
        shutil.rmtree(run / "checkpoints" / str(later))
    for name in ("metrics.jsonl", "completions.jsonl"):
        lines = [line for line in runs.lines_of(run / name) if line["step"] <= step + 4]  # no more without a checkpoint
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "half')
    resumed(run)
    assert_same_run(run, Path(unbroken.output))


def test_prompts_come_in_the_order_of_the_unbroken_run(unbroken: TrainConfig) -> None:
    """8 training prompts, 4 a step: two steps are an epoch, and each epoch has each prompt once."""
    lines = [line for line in runs.lines_of(Path(unbroken.output) / "completions.jsonl") if line["phase"] == "train"]
    drawn = [{line["prompt_id"] for line in lines if line["step"] == step} for step in range(1, STEPS + 1)]
    for epoch in range(STEPS // 2):
        assert drawn[2 * epoch] | drawn[2 * epoch + 1] == set(range(8))
    assert len({frozenset(ids) for ids in drawn}) > 2, "every epoch has the same batches"


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_costs_time_and_nothing_else(
    unbroken: TrainConfig,
    tmp_path: Path,
    resumed: Callable[[Path], dict],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    for path in (run / "checkpoints").glob("6/**/d/*"):
        path.write_bytes(path.read_bytes()[:100])
    damaged = files_of(run / "checkpoints" / "6")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm"):
        resumed(run)
    ours = [record.getMessage() for record in caplog.records if record.name == "jaxrl_llm.checkpoints"]
    assert len([message for message in ours if "is damaged and skipped" in message]) == 1
    said = capsys.readouterr().out
    assert "resuming from step 4" in said
    assert "a damaged checkpoint is now " in said
    assert files_of(run / "checkpoints-set-aside" / "6") == damaged
    assert_same_run(run, Path(unbroken.output))


def damage_all(run: Path) -> None:
    for path in (run / "checkpoints").glob("*/**/d/*"):
        path.write_bytes(path.read_bytes()[:100])


def edit(**changes: Any) -> Callable[[Path], None]:
    """Change settings in the run's config.json."""

    def change(run: Path) -> None:
        config = read_json(run / "config.json")
        (run / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def unreadable(run: Path) -> None:
    path = next((run / "checkpoints" / "6").rglob("d/*"))
    path.unlink()
    path.symlink_to(path)


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


MODELS = runs.MODEL.parent
CANNOT: dict[str, tuple[Callable[[Path], None], str]] = {
    "all damaged": (damage_all, "none of the 3 checkpoints in .* can be used: all are damaged; nothing was changed"),
    "cannot be read": (unreadable, r"checkpoints/6 cannot be read \(Too many levels of symbolic links"),
    "no checkpoints": (without_checkpoints, "metrics.jsonl has 6 steps, but there are no checkpoints"),
    "another dtype": (edit(param_dtype="bfloat16"), "param_dtype was 'float32', and is now 'bfloat16'"),
    "LoRA": (edit(lora_rank=2), "lora_rank was 0, and is now 2"),
    "other moments": (
        edit(optimizer={"moments": "factored"}),
        "optimizer.moments was 'float32', and is now 'factored'",
    ),
    "another method": (edit(algorithm="rloo"), "algorithm was 'grpo', and is now 'rloo'"),
    "a method with memory": (edit(algorithm="r2vpo"), "algorithm was 'grpo', and is now 'r2vpo'"),
    "another model": (edit(model=str(MODELS / "llama")), "model was .*, and is now .*; the model's weights changed"),
    "another learning rate": (
        edit(optimizer={"learning_rate": 0.5}),
        "learning_rate was 0.002, and is now 0.5",
    ),
    "fewer steps": (edit(steps=3), "the checkpoint is of step 6, but steps is 3: raise steps"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_go_on_is_refused_and_loses_nothing(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict], case: str
) -> None:
    """A run used to begin again at step 0, with all checkpoints and metrics deleted."""
    harm, said = CANNOT[case]
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    harm(run)
    before = files_of(run)
    with pytest.raises(InputError, match=said) as caught:
        resumed(run)
    assert "\n" not in str(caught.value)
    assert files_of(run) == before


def test_another_structure_is_refused_though_it_is_accepted(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    edit(lora_rank=2)(run)
    before = files_of(run)
    with pytest.raises(InputError, match="checkpoints/6 does not fit the run's settings: the parameter layers/"):
        loop.resume(str(run), accept_changed_inputs=True)
    assert files_of(run) == before


def test_more_steps_are_said_and_taken(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    edit(steps=STEPS + 1)(run)
    resumed(run)
    assert "since the checkpoint, steps was 6, and is now 7" in capsys.readouterr().out
    assert len(runs.lines_of(run / "metrics.jsonl")) == STEPS + 1


def changed_prompts(folder: Path) -> None:
    path = folder / "prompts.jsonl"
    path.write_text(path.read_text().replace('"answer": "1"', '"answer": "0"', 1))


def changed_rewards(folder: Path) -> None:
    path = folder / "rewards.py"
    path.write_text(path.read_text() + "\n# changed\n")


def changed_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_prompts, "the prompts changed|the held-out prompts changed"),
        pytest.param(changed_rewards, "the reward even changed", marks=pytest.mark.heavy),
        (changed_weights, "the model's weights changed"),
    ],
)
def test_changed_inputs_are_refused_unless_they_are_accepted(
    tmp_path: Path, resumed: Callable[[Path], dict], change: Callable[[Path], None], said: str
) -> None:
    shutil.copytree(runs.MODEL, tmp_path / "model", copy_function=shutil.copyfile)
    config = runs.small_config(tmp_path, model=str(tmp_path / "model"), steps=2, checkpoint_every=1)
    runs.train(config)
    run = Path(config.output)
    change(tmp_path)
    before = files_of(run)
    with pytest.raises(InputError, match=f"changed since the checkpoint was written: ({said})") as caught:
        resumed(run)
    assert "--accept-changed-inputs" in str(caught.value)
    assert files_of(run) == before
    assert loop.resume(str(run), accept_changed_inputs=True)["steps"] == 2
    if change is changed_weights:
        shutil.rmtree(run / "checkpoints" / "2")
        with pytest.raises(InputError, match=said):
            load_run(str(run))
        load_run(str(run), accept_changed_inputs=True)


def test_a_run_in_use_is_left_alone(unbroken: TrainConfig, resumed: Callable[[Path], dict]) -> None:
    run = Path(unbroken.output)
    with locked(run), pytest.raises(InputError, match=f"in use by process {os.getpid()} on host"):
        resumed(run)


def test_ctrl_c_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a callback, where an exception would be swallowed: the loop stops at its next check."""
    config = runs.small_config(tmp_path, eval_size=0)

    def swallow(*arguments: Any) -> Any:
        with suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        return prepare(*arguments)

    prepare = learner.prepare
    monkeypatch.setattr(learner, "prepare", swallow)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        runs.train(config)
    assert signal.getsignal(signal.SIGINT) is before
    assert runs.lines_of(Path(config.output) / "metrics.jsonl") == [], "nothing of a half step is kept"


def test_ctrl_c_after_the_last_step_spares_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and the run that is resumed writes it."""
    config = runs.small_config(tmp_path, eval_size=0)
    summed, reported = journal.closing_summary, list[Path]()

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return summed(*arguments)

    monkeypatch.setattr(loop, "write_report", reported.append)
    monkeypatch.setattr(journal, "closing_summary", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.train(config)
    assert reported == []
    monkeypatch.setattr(journal, "closing_summary", summed)
    summary = loop.resume(config.output)
    assert (summary["steps"], reported) == (config.steps, [Path(config.output)])


@pytest.mark.heavy
def test_an_evaluation_that_was_cut_off_leaves_no_second_copy(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict]
) -> None:
    """Killed after the completions of the evaluation before training, before its figures were written."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(Path(unbroken.output) / "config.json", run)
    lines = (Path(unbroken.output) / "completions.jsonl").read_text().splitlines(keepends=True)
    before = [line for line in lines if '"eval_before"' in line]
    assert len(before) == 4
    (run / "completions.jsonl").write_text("".join(before))
    resumed(run)
    assert_same_run(run, Path(unbroken.output))


def test_resuming_a_finished_run_changes_nothing(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    summary = resumed(run)
    assert summary["had_signal"]
    assert_same_run(run, Path(unbroken.output))
