"""A run follows its configuration, and reports when it cannot learn."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs
from compiling import with_devices
from conftest import count_programs

from jaxrl_llm import algorithms
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.source import Curriculum, Replay, Source
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, chain
from jaxrl_llm.learner.nonfinite import NotFiniteError
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.update import update
from jaxrl_llm.models import load_policy
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.utils.errors import InputError


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end without their report, whose charts take longer than the run."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)


def metrics_of(config: TrainConfig) -> list[dict[str, Any]]:
    return runs.lines_of(Path(config.output) / "metrics.jsonl")


def completions_of(run: Path, **only: Any) -> list[dict[str, Any]]:
    lines = runs.lines_of(run / "completions.jsonl")
    return [line for line in lines if all(line[name] == value for name, value in only.items())]


def test_the_summary_adds_up() -> None:
    run = runs.finished_run()
    summary = json.loads((run / "summary.json").read_text())
    metrics = runs.lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert summary["tokens"]["sampled"] == sum(line["completion/tokens"] for line in metrics)
    phases = {"load", "compile", "evaluate", "sample", "score", "update", "checkpoint", "other"}
    assert set(summary["seconds"]) == phases
    for phase in ("sample", "score", "update"):
        assert summary["seconds"][phase] == pytest.approx(sum(line[f"seconds/{phase}"] for line in metrics), abs=2e-3)
    assert summary["steps"] == 4
    assert summary["had_signal"] is True
    assert summary["prompts"] == {"training": 8, "skipped": 0, "truncated": 0, "conflicting": 0}
    for name in ("eval_before", "eval_after"):
        answers = completions_of(run, phase=name)
        assert len(answers) == summary[name]["prompts"] == 4
        assert summary[name]["accuracy"] == np.mean([line["reward"] == 1.0 for line in answers])
        assert summary[name]["accuracy"] == np.mean([line["correct"] for line in answers])
        assert summary[name]["low"] <= summary[name]["accuracy"] <= summary[name]["high"]
    held_out = {line["prompt"] for line in completions_of(run, phase="eval_after")}
    trained = {line["prompt"] for line in completions_of(run, phase="train")}
    assert len(held_out) == 4
    assert len(trained) == 8
    assert not held_out & trained


def test_the_metrics_are_those_of_the_completions() -> None:
    run = runs.finished_run()
    for line in runs.lines_of(run / "metrics.jsonl"):
        rows = completions_of(run, phase="train", step=line["step"])
        assert len(rows) == 16
        rewards = [row["rewards"]["even"] for row in rows]
        assert line["reward/mean"] == pytest.approx(np.mean(rewards), abs=1e-6)
        assert line["reward/std"] == pytest.approx(np.std(rewards), abs=1e-6)
        assert line["rewards/even/failed"] == 0
        assert line["completion/length"] == np.mean([len(row["tokens"]) for row in rows])
        groups = np.asarray([row["reward"] for row in rows]).reshape(4, 4)
        assert line["groups/uniform"] == np.mean(np.ptp(groups, axis=1) == 0)
        for group in range(4):
            advantages = [np.mean(row["advantage"]) for row in rows[4 * group : 4 * group + 4]]
            assert sum(advantages) == pytest.approx(0, abs=1e-3)
        assert line["learning_rate"] == pytest.approx(2e-3)
        assert line["mismatch"] < 1e-4, "the trainer's log-probabilities are the sampler's"


def test_the_report_shows_curves_and_completions() -> None:
    text = (runs.finished_run() / "report.html").read_text()
    assert text.count("<svg") >= 8
    for title in ("Reward", "KL to the reference", "Entropy", "Completion length", "Gradient norm", "number 0"):
        assert title in text
    assert "Outcomes of 4 prompts" in text
    assert "Settings that differ from the defaults" in text
    assert "<code>prompts_per_step</code>" in text.replace("<wbr>", "")
    assert "<code>epochs</code>" not in text
    assert len(text) < 5_000_000


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("writing the report needs the package 'matplotlib'"), "the package 'matplotlib'"),
        (KeyError("a fault of the report"), "a fault of the report"),
    ],
    ids=["package", "fault"],
)
def test_a_run_without_a_report_is_a_run(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing package for charts, or a fault of the report, must not fail hours of training."""

    def fail(folder: Path) -> Path:
        raise error

    monkeypatch.setattr(loop, "write_report", fail)
    config = runs.small_config(tmp_path, steps=1, eval_size=0)
    summary = loop.train(config)
    assert summary["had_signal"]
    (line,) = [text for text in caplog.text.splitlines() if "no report was written" in text]
    assert said in line
    assert f"jaxrl report {config.output} tries again" in line


@pytest.mark.heavy
def test_equal_configurations_give_equal_runs_and_other_seeds_do_not(tmp_path: Path) -> None:
    again, expected = runs.small_config(tmp_path), runs.finished_run()
    programs = count_programs(update)
    runs.train(again)
    assert programs() == [1], "all steps are one program"
    run = Path(again.output)
    runs.assert_equal_trees(runs.final_params(run), runs.final_params(expected))
    assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(expected / "metrics.jsonl")
    other = runs.small_config(tmp_path, seed=1, output=str(tmp_path / "other"), steps=1)
    runs.train(other)
    ours, theirs = (completions_of(Path(c.output), phase="train", step=1) for c in (again, other))
    assert [row["tokens"] for row in ours] != [row["tokens"] for row in theirs]


@pytest.mark.heavy
def test_at_learning_rate_0_only_the_samples_change(tmp_path: Path) -> None:
    """Two steps over the same prompts with the same parameters have other keys, and so other completions."""
    config = runs.small_config(
        tmp_path, steps=2, eval_size=0, num_prompts=4, optimizer=OptimizerConfig(learning_rate=0.0)
    )
    runs.train(config)
    first, second = (
        {(row["prompt"], row["sample"]): row["tokens"] for row in completions_of(Path(config.output), step=step)}
        for step in (1, 2)
    )
    assert set(first) == set(second)
    assert len(first) == 16
    assert sum(first[key] == second[key] for key in first) <= 2
    assert len({tuple(tokens) for tokens in first.values()}) > 8, "samples of a prompt differ"
    _, params, _ = load_policy(runs.MODEL)
    runs.assert_equal_trees(runs.final_params(Path(config.output)), jax.tree.map(np.asarray, params))
    assert [line["learning_rate"] for line in metrics_of(config)] == [0.0, 0.0]


@pytest.mark.usefixtures("no_report")
def test_a_curriculum_chooses_the_prompts_and_goes_on_from_a_checkpoint(no_report: None, tmp_path: Path) -> None:
    """Training rows from the last to the first, rather than shuffled."""

    def backwards(rows: list[dict[str, Any]]) -> Curriculum:
        def select(at: int, count: int) -> tuple[np.ndarray, int]:
            return np.arange(at - 1, at - 1 - count, -1) % len(rows), at - count

        return Curriculum(lambda: len(rows), select, lambda at, step: at)

    config = runs.small_config(tmp_path, steps=3, eval_size=0, checkpoint_every=1, keep_checkpoints=3)
    loop.train(config, curriculum=backwards)
    asked = [
        list(dict.fromkeys(row["prompt"] for row in completions_of(Path(config.output), step=n))) for n in range(1, 4)
    ]
    assert asked == [[f"number {i:02d}:" for i in range(first, first - 4, -1)] for first in (11, 7, 3)]
    other = tmp_path / "other"
    shutil.copytree(config.output, other)
    for step in (2, 3):
        shutil.rmtree(other / "checkpoints" / str(step))
    loop.train(loop.RunFolder(other).read_config(), resume=True, curriculum=backwards)
    assert runs.reproducible(other / "metrics.jsonl") == runs.reproducible(Path(config.output) / "metrics.jsonl")


@pytest.mark.usefixtures("no_report")
def test_a_replay_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Rewards are relative to the mean of the step before, which is part of the source's state."""
    config = runs.small_config(tmp_path, steps=3, eval_size=0, checkpoint_every=1, keep_checkpoints=3)

    def mix(state: dict[str, np.ndarray], scored: Scored, step: int, seed: int) -> tuple[Scored, dict[str, np.ndarray]]:
        reward = scored.batch.need("reward")
        batch = scored.batch.replace(reward=reward - state["last"])
        return scored._replace(batch=batch), {"last": np.float32(np.mean(reward))}

    def source(parts: RunParts) -> Source:
        order = shuffled_epochs(parts.prompts.rows, config.seed)
        replay = Replay(lambda: {"last": np.float32(0)}, mix)
        return experience(
            Experience(
                parts.policy, parts.prompts, parts.rewards, order, config.sampling, replay=replay,
                prompts_per_step=config.prompts_per_step, group_size=config.group_size,
            )
        )  # fmt: skip

    loop.train(config, source=source)
    lines = runs.reproducible(Path(config.output) / "metrics.jsonl")
    assert lines[0]["reward/mean"] > 0.3
    assert abs(lines[1]["reward/mean"]) < 0.3
    other = tmp_path / "other"
    shutil.copytree(config.output, other)
    for step in (2, 3):
        shutil.rmtree(other / "checkpoints" / str(step))
    loop.train(loop.RunFolder(other).read_config(), resume=True, source=source)
    assert runs.reproducible(other / "metrics.jsonl") == lines


def test_a_source_has_its_own_curriculum(tmp_path: Path) -> None:
    def unused(given: Any) -> Any:
        raise AssertionError("neither is made")

    with pytest.raises(InputError, match="either a source or a curriculum, not both"):
        loop.train(runs.small_config(tmp_path), source=unused, curriculum=unused)


def test_a_constant_reward_is_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.small_config(tmp_path, reward="constant")
    assert main(["train", *runs.as_arguments(config), "--fail-without-signal"]) == 1
    out = capsys.readouterr().out
    assert "step 1: no learning signal: all rewards are equal within every group (mean 0.5)" in out
    assert "step 2: no learning signal" not in out, "once is enough, then every tenth time"
    assert "warning: nothing was learned" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["had_signal"] is False
    assert summary["steps_without_signal"] == 4
    assert summary["warnings"] == ["nothing was learned: no step had a learning signal (no token had an advantage)"]
    assert [line["groups/uniform"] for line in metrics_of(config)] == [1.0] * 4


@pytest.mark.heavy
def test_one_sample_a_prompt_is_a_signal_where_the_method_takes_it_for_one(tmp_path: Path) -> None:
    """Groups of one have equal rewards by themselves, but their gradient is not 0."""
    config = runs.small_config(
        tmp_path, algorithm="reinforce", group_size=1, prompts_per_step=8, steps=1, eval_size=0, minibatches=1
    )
    summary = runs.train(config)
    assert summary["had_signal"]
    assert summary["warnings"] == []
    (line,) = metrics_of(config)
    assert line["signal"] == 1.0
    assert line["groups/uniform"] == 1.0
    assert line["grad_norm"] > 0


@pytest.mark.heavy
def test_completions_of_one_token_are_said_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model for which every token ends the completion, as with a wrong chat template."""
    model = tmp_path / "model"
    shutil.copytree(runs.MODEL, model, copy_function=shutil.copyfile)
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**raw, "eos_token_id": list(range(257))}))
    config = runs.small_config(
        tmp_path, model=str(model), reward="starts_even", eval_size=0, steps=2, minibatches=1, top_p=1.0,
        hyperparameters={"kl_coefficient": 0.0},
    )  # fmt: skip
    summary = runs.train(config)
    assert {line["completion/longest"] for line in metrics_of(config)} == {1.0}
    out = capsys.readouterr().out
    assert "step 1: every completion is a single token: does the model expect another chat template?" in out
    assert any("2 of 2 steps had only completions of a single token" in text for text in summary["warnings"])
    assert f"warning: {summary['warnings'][-1]}" in out
    assert {line["completion/truncated"] for line in metrics_of(config)} == {0.0}


def nan_from(step: int) -> Callable[[], Algorithm]:
    """A method that counts its batches, and whose advantages are NaN from a given batch on."""

    def count(seen: jax.Array, batch: Trajectories) -> tuple[jax.Array, Trajectories]:
        values = jnp.where(seen >= step, jnp.nan, 1.0)
        return seen + 1, batch.replace(advantages=jnp.broadcast_to(values, batch.tokens.shape))

    def method() -> Algorithm:
        transform = chain(Transform(init=lambda: jnp.int32(0), apply=count))
        return Algorithm(transform, policy_gradient(token_ratio(), clip(0.2, 0.2), sequence_mean()))

    return method


@pytest.mark.heavy
@pytest.mark.usefixtures("no_report")
def test_a_loss_that_is_not_finite_stops_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(algorithms.CATALOGUE, "counting", nan_from(step=2))
    config = runs.small_config(tmp_path, algorithm="counting", eval_size=0, minibatches=1)
    assert main(["train", *runs.as_arguments(config)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: step 3: the batch's advantages is not finite; the parameters were not changed")
    assert errors.count("\n") == 1
    assert [line["step"] for line in metrics_of(config)] == [1, 2]
    good = runs.final_params(tmp_path / "run")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(good))
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    # The count is in the checkpoint: had it begun anew, two more steps would have gone well.
    with pytest.raises(NotFiniteError, match="step 3: the batch's advantages"):
        loop.resume(config.output)
    runs.assert_equal_trees(runs.final_params(tmp_path / "run"), good)


def test_rewards_that_fail_do_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = runs.write_rewards(tmp_path)
    names = ("even", "picky", "hanging", "short", "unscored")
    config = runs.small_config(
        tmp_path, rewards=tuple(f"{file}:{name}" for name in names), reward_time_limit=0.3, steps=2, eval_size=0
    )
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        summary = runs.train(config)
    assert summary["had_signal"]
    lost = []
    for line in metrics_of(config):
        rows = completions_of(Path(config.output), step=line["step"])
        lost.append(np.mean([row["rewards"]["picky"] == 0.0 for row in rows]))
        assert line["rewards/picky/failed"] == lost[-1]
        assert line["rewards/hanging/failed"] == line["rewards/short/failed"] == 1.0
        assert line["rewards/even/failed"] == line["rewards/unscored/failed"] == 0.0
        assert line["reward/unscored"] == 0.0
        assert "rewards/unscored" not in line
    assert 0 < lost[0] < 1
    messages = [record.getMessage() for record in caplog.records]
    picky, hanging, short = ([text for text in messages if f"'{name}' failed" in text] for name in names[1:4])
    assert len(messages) == len(picky) + len(hanging) + len(short)
    assert len(picky) == sum(share > 0 for share in lost), "one line for each step"
    assert f"failed on {round(16 * lost[0])} of 16 samples, which get 0: ValueError: a last token that" in picky[0]
    assert len(hanging) == len(short) == 2
    assert "16 of 16" in hanging[0]
    assert "time limit of 0.3 s" in hanging[0]
    assert "1 values for 16 samples" in short[0]


def test_a_reward_that_scores_nothing_gives_nothing_to_learn(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, reward="unscored", steps=2)
    summary = runs.train(config)
    assert summary["had_signal"] is False
    assert summary["eval_after"]["reward"] is None
    for line in metrics_of(config):
        assert line["reward/unscored"] == 1.0
        assert "reward/mean" not in line


@pytest.mark.heavy
def test_long_prompts_are_counted(tmp_path: Path) -> None:
    prompts = runs.write_prompts(tmp_path / "mixed.jsonl", count=9)
    with prompts.open("a") as file:
        for i in range(3):
            file.write(json.dumps({"prompt": f"{i} is a number {'so ' * 60}long:", "answer": "0"}) + "\n")
    skip = runs.small_config(tmp_path, prompts=str(prompts), eval_size=0, steps=1)
    assert runs.train(skip)["prompts"] == {"training": 9, "skipped": 3, "truncated": 0, "conflicting": 0}
    cut = {"output": str(tmp_path / "cut"), "long_prompts": "truncate", "max_prompt_tokens": 10}
    config = TrainConfig(**{**vars(skip), **cut})
    assert runs.train(config)["prompts"] == {"training": 12, "skipped": 0, "truncated": 3, "conflicting": 0}


FOUR_DEVICES = """
import sys
sys.path.insert(0, {tests!r})
import pathlib, shutil
import jax
import tiny_runs as runs
from jaxrl_llm.training import loop
assert jax.device_count() == 4
loop.write_report = lambda folder: folder
folder = pathlib.Path({folder!r})
whole = runs.small_config(folder, minibatches=1, top_p=1.0, hyperparameters={{"kl_coefficient": 0.0}}, eval_every=2)
loop.train(whole)
shutil.copytree(folder / "run", folder / "resumed")
shutil.rmtree(folder / "resumed" / "checkpoints" / "4")
loop.resume(str(folder / "resumed"))
runs.assert_equal_trees(runs.final_params(folder / "run"), runs.final_params(folder / "resumed"))
assert runs.reproducible(folder / "run/metrics.jsonl") == runs.reproducible(folder / "resumed/metrics.jsonl")
"""


@pytest.mark.heavy
def test_four_devices_train_evaluate_and_resume(tmp_path: Path) -> None:
    code = FOUR_DEVICES.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    # Speed does not matter here, so the compiler need not take its time.
    flags = {"XLA_FLAGS": with_devices(4)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=runs.environment(**flags), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 cpu devices" in done.stdout
    assert "resuming from step 2" in done.stdout
