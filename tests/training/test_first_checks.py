"""What can be checked before the model and the whole data are read is, and all mistakes are told together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs

from jaxrl_llm.cli.commands import changed
from jaxrl_llm.cli.program import main
from jaxrl_llm.reporting.logging import services
from jaxrl_llm.rewards.workers.process import ProcessFunction
from jaxrl_llm.training import inputs, loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import from_dict, to_dict
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.utils.errors import InputError


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all of the data fails the test."""
    monkeypatch.setattr(inputs, "split_prompts", lambda *_: pytest.fail("the data was read"))


@pytest.mark.usefixtures("no_data")
def test_mistakes_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.small_config(tmp_path, reward="needy", model="./none", wandb="x", eval_reward="even")
    Path(config.output).mkdir()
    (Path(config.output) / "config.json").write_text(json.dumps(to_dict(config)))
    assert main(["train", *runs.as_arguments(config)]) == 2
    errors = capsys.readouterr().err.splitlines()
    wanted = ("'solution'", "reward to judge by 'even'", "'wandb'", "'./none' is no folder", "holds a run already")
    assert len(errors) == len(wanted), errors
    for text in wanted:
        assert any(text in line for line in errors), text


@pytest.mark.usefixtures("no_data")
def test_data_and_rewards_that_are_wrong_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--prompts", str(tmp_path / "none.jsonl"), "--eval-prompts", str(tmp_path / "nor.parquet")]
    assert main([*arguments, "--rewards", "nope", "--model", str(runs.MODEL), "--output", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "none.jsonl" in errors[0]
    assert "nor.parquet" in errors[1]
    assert "unknown reward 'nope'" in errors[2]


@pytest.mark.usefixtures("no_data")
def test_tasks_are_known_without_their_package_being_imported(tmp_path: Path) -> None:
    """Which takes more than a second."""
    code = (
        "import sys; from jaxrl_llm.data.generate import check_task; check_task('chain_sum');"
        "assert 'reasoning_gym' not in sys.modules and 'sympy' not in sys.modules; check_task('chain_smu')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=runs.environment())
    assert done.stderr.splitlines()[-1].endswith("chain_sum, chain_smu") or "did you mean 'chain_sum'" in done.stderr


def test_rewards_end_when_something_else_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = ProcessFunction.close

    def noted(self: ProcessFunction) -> None:
        closed.append(self.__name__)
        close(self)

    monkeypatch.setattr(ProcessFunction, "close", noted)
    config = runs.small_config(tmp_path, model="./none")
    with pytest.raises(InputError, match="no folder"), inputs.read_inputs(config):
        pass
    assert "even" in closed


def test_a_run_without_its_logger_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights & Biases is installed, but does not start: the folder is as free as before."""

    class NoLogin:
        @staticmethod
        def init(**_: Any) -> None:
            raise RuntimeError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", NoLogin)
    monkeypatch.setattr(services, "_installed", lambda package: True)
    config = runs.small_config(tmp_path, wandb="mine", tensorboard=True, eval_size=0, steps=1)
    with pytest.raises(InputError, match="Weights & Biases does not start: api_key not configured"):
        runs.train(config)
    RunFolder(config.output).check_free()
    assert not (Path(config.output) / "config.json").exists()


def test_the_package_that_is_missing_is_told_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = runs.small_config(tmp_path, wandb="mine")
    with pytest.raises(InputError, match="Weights & Biases needs the package 'wandb'"):
        runs.train(config)
    assert not Path(config.output).exists()


def test_a_run_goes_on_for_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--resume RUN --steps N, and again without it: the new number stays."""
    config = runs.small_config(tmp_path, steps=2, checkpoint_every=1)
    runs.train(config)
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    before = loop.write_report
    loop.write_report = lambda folder: folder
    try:
        assert main(["train", "--resume", str(run), "--steps", "4", "--eval-every=1"]) == 0
        out = capsys.readouterr().out
        assert "since the checkpoint, steps was 2, and is now 4" in out
        assert "step 3/4" in out
        assert main(["train", "--resume", str(run)]) == 0
    finally:
        loop.write_report = before
    assert "resuming from step 4" in capsys.readouterr().out
    assert [line["step"] for line in runs.lines_of(run / "metrics.jsonl")] == [1, 2, 3, 4]
    phases = [(line["phase"], line["step"]) for line in runs.lines_of(run / "completions.jsonl")]
    assert list(dict.fromkeys(phases)) == [
        ("eval_before", 0), ("train", 1), ("train", 2), ("train", 3), ("eval_latest", 3), ("train", 4),
        ("eval_after", 4),
    ]  # fmt: skip
    written = RunFolder(run).read_config()
    assert (written.steps, written.eval_every) == (4, 1)
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 2, 4]


def test_settings_of_steps_that_were_taken_stay(tmp_path: Path) -> None:
    config = TrainConfig(steps=5, prompts_per_step=6, micro_batches=3)
    assert changed(config, []) is config
    found = changed(config, ["--steps", "9", "--no-tensorboard", "--micro_batches=2", "--wandb", "mine"])
    assert found == from_dict(
        {**to_dict(config), "steps": 9, "tensorboard": False, "micro_batches": 2, "wandb": "mine"}
    )
    with pytest.raises(InputError, match=r"--resume uses the run's own settings, .* remove --seed --algorithm"):
        changed(config, ["--seed", "3", "--steps", "9", "--algorithm=ppo"])
    with pytest.raises(InputError, match="remove what"):
        changed(config, ["what"])
    with pytest.raises(InputError, match="prompts_per_step is 6, but must be a multiple"):
        changed(config, ["--micro-batches", "5"])


def test_a_run_that_has_ended_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler would try again; who wants that says so."""
    monkeypatch.setattr(loop, "train", lambda *_, **__: {"had_signal": False})
    config = runs.small_config(tmp_path)
    arguments = ["train", *runs.as_arguments(config)]
    assert main(arguments) == 0
    assert main([*arguments, "--fail-without-signal"]) == 1
    monkeypatch.setattr(loop, "train", lambda *_, **__: {"had_signal": True})
    assert main([*arguments, "--fail-without-signal"]) == 0


@pytest.mark.parametrize(("answer", "shown"), [(None, "None"), (["1", "2"], "['1', '2']"), ({"a": 1}, "{'a': 1}")])
def test_answers_that_no_verifier_reads_are_told_with_their_row(tmp_path: Path, answer: Any, shown: str) -> None:
    rows = [{"prompt": "1 + 1 =", "answer": ["2"]}, {"prompt": "1 + 2 =", "answer": 3.0}]
    rows.append({"prompt": "1 + 3 =", "answer": answer})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(
        model=str(runs.MODEL), prompts=str(path), rewards=("number_match",), eval_size=0, output=str(tmp_path / "run")
    )
    with (
        pytest.raises(
            InputError, match=r"row 3, '1 \+ 3 =': the answer is .*, but must be a text or a number"
        ) as caught,
        inputs.read_inputs(config),
    ):
        pass
    assert shown in str(caught.value)
