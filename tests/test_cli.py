"""The command line: what is said where, what it writes, and with which status it ends."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "training"))

import tiny_runs as runs

from jaxrl_llm import algorithms, load_policy
from jaxrl_llm.algorithms import grpo
from jaxrl_llm.cli import COMMANDS, main
from jaxrl_llm.options import parse_config
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig, from_dict, to_dict
from jaxrl_llm.training.optimizer import OptimizerConfig


def output_of(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> str:
    """What a command prints."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out


@pytest.fixture
def copied_run(tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed at will, with the files that its configuration names."""
    shutil.copytree(runs.finished_run(), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_commands_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, *arguments)
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert inspect.getdoc(command).splitlines()[0] in text  # type: ignore[union-attr]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_helps(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(output_of(capsys, command, "--help").split())
    assert " ".join(inspect.getdoc(COMMANDS[command]).split())[:60] in text.replace("│ ", "")  # type: ignore[union-attr]


def test_the_help_of_train_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "train", "--help")
    for field in dataclasses.fields(TrainConfig):
        name = field.name.replace("_", "-")
        if field.name == "hyperparameters":
            for parameter in inspect.signature(grpo).parameters:
                assert f"--algorithm.{parameter.replace('_', '-')} " in text
        elif field.name == "optimizer":
            for inner in dataclasses.fields(OptimizerConfig):
                assert f"--optimizer.{inner.name.replace('_', '-')} " in text
        else:
            assert re.search(rf"--{name}[ ,]", text), name
    for more in ("--resume RUN", "--config FILE", "--traceback"):
        assert more in " ".join(text.replace("│", " ").split())


def test_every_setting_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """A line under each field, which is what the help shows."""
    source = inspect.getsource(TrainConfig) + inspect.getsource(OptimizerConfig)
    for kind in (TrainConfig, OptimizerConfig):
        for field in dataclasses.fields(kind):
            assert re.search(rf'    {field.name}: [^\n]*\n    """[A-Z%-]?\w', source), field.name


def test_an_unknown_command_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown command 'trian': did you mean 'train'?" in capsys.readouterr().err


SETTINGS: dict[str, Any] = {
    "steps": 7,
    "temperature": 0.5,
    "prompt_template": "- {prompt}\nAnswer:",
    "system_prompt": "--- be brief ---",
    "stop": ["\n\n", "</s>"],
    "rewards": ["number_match*0.5", "format_match(x+)"],
    "remat": False,
    "task_options": {"max_digits": 3, "name": "x y"},
    "optimizer": {"learning_rate": 3e-6, "schedule": "cosine"},
    "hyperparameters": {"clip_high": 0.28, "scale": "none"},
}
YAML = """
steps: 7
temperature: 0.5
prompt-template: "- {prompt}\\nAnswer:"
system_prompt: "--- be brief ---"
stop: ["\\n\\n", "</s>"]
rewards: [number_match*0.5, format_match(x+)]
remat: false
wandb: null
task_options: {max_digits: 3, name: x y}
optimizer:
  learning_rate: 3e-6
  schedule: cosine
hyperparameters:
  clip_high: 0.28
  scale: none
"""
TOML = """
steps = 7
temperature = 0.5
prompt_template = "- {prompt}\\nAnswer:"
system_prompt = "--- be brief ---"
stop = ["\\n\\n", "</s>"]
rewards = ["number_match*0.5", "format_match(x+)"]
remat = false
[task_options]
max_digits = 3
name = "x y"
[optimizer]
learning-rate = 3e-6
schedule = "cosine"
[hyperparameters]
clip-high = 0.28
scale = "none"
"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.yml", YAML), ("run.toml", TOML)])
def test_files_set_what_options_set(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    expected = from_dict(
        {
            **SETTINGS,
            "task_options": {"max_digits": "3", "name": "x y"},
            "hyperparameters": {**grpo_defaults(), **SETTINGS["hyperparameters"]},
        }
    )
    assert parse_config(["--config", str(tmp_path / name)]) == expected
    assert parse_config([f"--config={tmp_path / name}"]) == expected


def grpo_defaults() -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(grpo).parameters.items()}


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    more = ["--steps", "9", "--optimizer.schedule", "linear", "--algorithm.scale=std", "--stop", "--remat"]
    for arguments in ([*more, "--config", str(tmp_path / "run.yaml")], [f"--config={tmp_path / 'run.yaml'}", *more]):
        config = parse_config(arguments)
        assert (config.steps, config.temperature) == (9, 0.5)
        assert config.optimizer == OptimizerConfig(learning_rate=3e-6, schedule="linear")
        assert config.hyperparameters == {**grpo_defaults(), "clip_high": 0.28, "scale": "std"}
        assert config.stop == ()
        assert config.remat is True


def test_nothing_given_is_the_default() -> None:
    assert parse_config([]) == dataclasses.replace(TrainConfig(), hyperparameters=grpo_defaults())


def test_options_of_the_algorithm_are_its_hyperparameters() -> None:
    config = parse_config(["--algorithm", "grpo", "--algorithm.clip-high", "0.28"])
    assert config.algorithm == "grpo"
    assert config.hyperparameters == {**grpo_defaults(), "clip_high": 0.28}


def test_the_options_are_those_of_the_algorithm_that_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line, the last time, or else in the file."""

    def other(strength: float = 2.0, gentle: bool = False) -> algorithms.Algorithm:
        """Another method."""
        return grpo(clip_low=strength)

    monkeypatch.setitem(algorithms.CATALOGUE, "other", other)
    wanted = {"strength": 3.0, "gentle": True}
    given = ["--algorithm.strength", "3", "--algorithm.gentle"]
    assert parse_config(["--algorithm", "grpo", "--algorithm=other", *given]).hyperparameters == wanted
    (tmp_path / "run.yaml").write_text("algorithm: other\nhyperparameters: {gentle: true}\n")
    assert parse_config(["--config", str(tmp_path / "run.yaml"), "--algorithm.strength=3"]).hyperparameters == wanted
    assert main(["train", "--algorithm", "other", "--algorithm.clip-high", "1"]) == 2
    assert "--algorithm.clip-high" in capsys.readouterr().err


def test_any_configuration_can_be_given_as_options(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, hyperparameters={**grpo_defaults(), "ddof": 0}, stop=("a b",), eval_every=3)
    assert parse_config(runs.as_arguments(config)) == config


def test_train_tells_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way once, with the report and TensorBoard's files."""
    config = runs.small_config(tmp_path, steps=2, tensorboard=True)
    text = output_of(capsys, "train", *runs.as_arguments(config))
    assert "grpo on " in text
    assert re.search(r"before training: accuracy \d+\.\d % \(\d+\.\d to \d+\.\d\) on 4 held-out prompts", text)
    assert [f"step {n}/2" in text for n in (1, 2)] == [True, True]
    assert text.rstrip().endswith(f"report: {tmp_path / 'run' / 'report.html'}")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        *("config.json", "summary.json", "metrics.jsonl", "completions.jsonl", "report.html"),
        *("checkpoints", "tensorboard"),
    }
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    written = from_dict(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert written == dataclasses.replace(config, hyperparameters=grpo_defaults())


def test_resume_through_the_command_line(
    copied_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    before = (copied_run / "completions.jsonl").read_bytes()
    shutil.rmtree(copied_run / "checkpoints" / "4")
    text = output_of(capsys, "train", "--resume", copied_run)
    assert f"into {copied_run}" in text, "the folder may have been moved"
    assert "going on from step 2" in text
    assert (copied_run / "completions.jsonl").read_bytes() == before
    assert (copied_run / "checkpoints" / "4").is_dir()


def test_eval_of_a_run_gives_what_the_run_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.finished_run()
    text = output_of(capsys, "eval", run, "--output", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == json.loads((run / "summary.json").read_text())["eval_after"]
    low, mean, high = (100 * figures[name] for name in ("low", "accuracy", "high"))
    assert text.splitlines() == [
        f"accuracy {mean:.1f} % ({low:.1f} to {high:.1f}) on 4 held-out prompts, 6.0 tokens a completion"
    ]


def test_eval_of_a_run_on_fewer_prompts_and_with_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.finished_run()
    arguments = ["eval", run, "--size", 2, "--samples", 4, "--output", tmp_path / "figures.json"]
    text = output_of(capsys, *arguments)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["prompts"], figures["samples"], figures["temperature"]) == (2, 4, 1.0)
    assert [line.split(" ")[0] for line in text.splitlines()] == ["accuracy", "pass@1", "pass@2", "pass@4"]
    for line, k in zip(text.splitlines()[1:], (1, 2, 4), strict=True):
        found = figures["pass_at"][str(k)]
        assert line == f"pass@{k} {100 * found['value']:.1f} % ({100 * found['low']:.1f} to {100 * found['high']:.1f})"
    assert output_of(capsys, *arguments) == text, "the same seed gives the same answers"
    assert main(["eval", str(run), "--size", "5"]) == 2
    assert "the run set 4 prompts" in capsys.readouterr().err


def test_eval_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`from_answer` gives each prompt its own answer, 0 or 1 in turn: half of them are right."""
    prompts = runs.write_prompts(tmp_path / "prompts.jsonl", count=4)
    rewards = f"{runs.write_rewards(tmp_path)}:from_answer"
    arguments = ["--prompts", prompts, "--rewards", rewards, "--size", 4, "--max-new-tokens", 6]
    text = output_of(capsys, "eval", runs.MODEL, *arguments)
    assert text.startswith("accuracy 50.0 % (15.0 to 85.0) on 4 held-out prompts, ")
    assert main(["eval", str(runs.MODEL), "--samples", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_sample_prints_completions(capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ["sample", runs.MODEL, "number 01:", "number 02:", "--temperature", 0, "--max-new-tokens", 6]
    text = output_of(capsys, *greedy)
    assert text.count("[number 01:] ") == text.count("[number 02:] ") == 1
    assert output_of(capsys, *greedy, "--seed", 1) == text
    drawn = ["sample", runs.finished_run(), "number 01:", "--samples", 4, "--max-new-tokens", 6, "--top-p", 0.9]
    text = output_of(capsys, *drawn)
    assert text.count("[number 01:] ") == 4
    assert output_of(capsys, *drawn) == text
    assert output_of(capsys, *drawn, "--seed", 1) != text


def test_export_writes_the_parameters_of_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, "export", runs.finished_run(), tmp_path / "model")
    assert text.strip() == str(tmp_path / "model")
    policy, params, tokenizer = load_policy(tmp_path / "model")
    runs.assert_equal_trees(jax.tree.map(np.asarray, params), runs.final_params(runs.finished_run()))
    start, untrained, _ = load_policy(runs.MODEL)
    assert policy.config == start.config
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, untrained)), strict=True))
    assert tokenizer("ab")["input_ids"] == [97, 98]


def test_algorithms_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(capsys, "algorithms").splitlines()
    assert [line.split()[0] for line in lines] == algorithms.names()
    assert any(line.startswith("grpo ") and "Group Relative Policy Optimization" in line for line in lines)
    text = output_of(capsys, "algorithms", "grpo")
    assert "def grpo(" in text
    assert "2402.03300" in text
    assert main(["algorithms", "gropo"]) == 2
    assert "did you mean 'grpo'?" in capsys.readouterr().err
    for command in ("algorithms", "report"):
        assert main([command, "grpo", "rloo"]) == 2
        assert "one name at most: remove rloo" in capsys.readouterr().err


def test_report_writes_the_page_again(copied_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied_run / "report.html").unlink()
    text = output_of(capsys, "report", copied_run)
    assert text.strip() == str(copied_run / "report.html")
    assert "<svg" in (copied_run / "report.html").read_text()


def test_the_report_shows_what_other_methods_make_of_the_completions(
    copied_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of(capsys, "report", copied_run, "--compare", "grpo", "rloo")
    text = (copied_run / "report.html").read_text()
    assert "Credit by method" in text
    assert text.count("<th>rloo</th>") == text.count("<th>grpo</th>") > 4
    assert main(["report", str(copied_run), "--compare"]) == 2
    assert "--compare needs at least one name" in capsys.readouterr().err
    assert main(["report", str(copied_run), "--compare", "gropo"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_a_run_without_held_out_prompts_asks_for_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs.finished_run(), run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "eval_size": 0}))
    assert main(["eval", str(run)]) == 2
    assert "the run has no held-out prompts (eval_size 0)" in capsys.readouterr().err


def test_an_interrupt_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(config: TrainConfig) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", stop)
    assert main(["train"]) == 130
    assert "goes on with jaxrl train --resume RUN" in capsys.readouterr().err


def test_the_installed_command_ends_with_its_status() -> None:
    command = [sys.executable, "-m", "jaxrl_llm.cli"]
    good = subprocess.run([*command, "algorithms"], capture_output=True, text=True, env=runs.environment(), check=False)
    bad = subprocess.run([*command, "nothing"], capture_output=True, text=True, env=runs.environment(), check=False)
    assert (good.returncode, bad.returncode) == (0, 2)
    assert good.stderr == ""
    assert bad.stderr.count("\n") == 1
    assert to_dict(TrainConfig())["algorithm"] in good.stdout
