"""A run that was killed, whenever that was, ends as one that was not."""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_runs as runs

from jaxrl_llm.errors import InputError
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig

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
    sums = [runs.lines_of(folder / f"checkpoints/{STEPS}/meta/metadata")[0]["checksums"] for folder in (run, other)]
    for one in sums:
        del one["meta"]  # it holds seconds
    assert sums[0] == sums[1]
    assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(other / "metrics.jsonl")
    assert (run / "completions.jsonl").read_bytes() == (other / "completions.jsonl").read_bytes()
    summaries = [loop.read_json(folder / "summary.json") for folder in (run, other)]
    for summary in summaries:
        assert set(summary.pop("seconds")) >= {"sample", "score", "update"}
    assert summaries[0] == summaries[1]


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


@pytest.mark.parametrize("step", [0, 2, 4, 6])
def test_the_stream_of_prompts_and_all_else_goes_on_from_each_checkpoint(
    unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict], step: int
) -> None:
    """The folder as a killed process leaves it: checkpoints up to `step`, lines of later steps, half a line."""
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    for later in range(step + 2, STEPS + 1, 2):
        shutil.rmtree(run / "checkpoints" / str(later))
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 5, "half')
    resumed(run)
    assert_same_run(run, Path(unbroken.output))


def test_prompts_come_in_the_order_of_the_unbroken_run(unbroken: TrainConfig) -> None:
    """8 training prompts, 4 a step: two steps are an epoch, and each epoch has each prompt once."""
    lines = [line for line in runs.lines_of(Path(unbroken.output) / "completions.jsonl") if line["phase"] == "train"]
    drawn = [{line["prompt_id"] for line in lines if line["step"] == step} for step in range(STEPS)]
    for epoch in range(STEPS // 2):
        assert drawn[2 * epoch] | drawn[2 * epoch + 1] == set(range(8))
    assert len({frozenset(ids) for ids in drawn}) > 2, "every epoch has the same batches"


@pytest.mark.parametrize("harm", ["newest", "all"])
def test_damaged_checkpoints_cost_time_and_nothing_else(
    unbroken: TrainConfig,
    tmp_path: Path,
    resumed: Callable[[Path], dict],
    harm: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    for path in (run / "checkpoints").glob("6/**/d/*" if harm == "newest" else "*/**/d/*"):
        path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm"):
        resumed(run)
    ours = [record.getMessage() for record in caplog.records if record.name == "jaxrl_llm.checkpoints"]
    damaged = [message for message in ours if "is damaged and skipped" in message]
    assert len(damaged) == (1 if harm == "newest" else 3)
    said = "going on from step 4" if harm == "newest" else "no checkpoint to go on from: starting at step 0"
    assert said in capsys.readouterr().out
    assert_same_run(run, Path(unbroken.output))


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
    assert summary["learned"]
    assert_same_run(run, Path(unbroken.output))


def test_other_data_are_noticed(unbroken: TrainConfig, tmp_path: Path, resumed: Callable[[Path], dict]) -> None:
    """The prompts changed under the run: their position means nothing any more."""
    run = tmp_path / "run"
    shutil.copytree(unbroken.output, run)
    config = loop.read_json(run / "config.json")
    prompts = runs.write_prompts(tmp_path / "fewer.jsonl", count=11)
    (run / "config.json").write_text(json.dumps({**config, "prompts": str(prompts)}))
    with pytest.raises(InputError, match="cannot resume the prompt stream: rows was 8, and is now 7"):
        resumed(run)
