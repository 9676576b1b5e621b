"""Runs of algorithms that a program gives, or a file: what their folders say, and what goes on with them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.objectives import entropy
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.health.oom import changed_options
from jaxrl_llm.utils.errors import InputError

FILE = """
from jaxrl_llm.algorithms import Algorithm, get

def mine(clip_high: float = 0.2, temper: float = 1.0) -> Algorithm:
    return get("grpo", clip_high=clip_high)

value = mine()
"""
STEPS = 2


def mine(clip_high: float = 0.2) -> Algorithm:
    """What `FILE` has under this name."""
    return algorithms.get("grpo", clip_high=clip_high)


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    return runs.small_config(folder, steps=STEPS, checkpoint_every=1, eval_size=0, **changes)


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a method of the catalogue."""
    config = config_of(tmp_path_factory.mktemp("name"))
    runs.train(config)
    return Path(config.output)


@pytest.fixture(scope="module")
def by_value(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a value."""
    config = config_of(tmp_path_factory.mktemp("value"))
    runs.train(config, algorithm=algorithms.get("grpo"))
    return Path(config.output)


@pytest.fixture(scope="module")
def by_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a function in a file, from the command line."""
    folder = tmp_path_factory.mktemp("file")
    (folder / "own.py").write_text(FILE)
    config = config_of(folder, algorithm=f"{folder}/own.py:mine")
    assert in_commands("train", *runs.as_arguments(config), "--algorithm.clip-high", "0.2") == 0
    return Path(config.output)


def in_commands(*arguments: str) -> int:
    """The exit status of a command, whose report is not drawn."""
    before = loop.write_report
    loop.write_report = lambda folder: folder
    try:
        return main(list(arguments))
    finally:
        loop.write_report = before


def copied(run: Path, folder: Path, last: int = STEPS) -> Path:
    """The run as it was after the step `last`."""
    shutil.copytree(run, folder / "run")
    for step in range(last + 1, STEPS + 1):
        shutil.rmtree(folder / f"run/checkpoints/{step}")
    return folder / "run"


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def refused(run: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """The message of a run that does not go on; its folder is as it was."""
    before = files_of(run)
    with pytest.raises(InputError) as error:
        loop.resume(str(run), **options)
    assert files_of(run) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_it_trains_as_its_name_does(by_name: Path, by_value: Path, by_file: Path) -> None:
    for run in (by_value, by_file):
        runs.assert_equal_trees(runs.final_params(run), runs.final_params(by_name))
        assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(by_name / "metrics.jsonl")


def test_the_folder_says_what_was_trained(by_name: Path, by_value: Path, by_file: Path) -> None:
    needs = sorted(algorithms.get("grpo").needs)
    assert needs
    name, value, file = (json.loads((run / "config.json").read_text()) for run in (by_name, by_value, by_file))
    assert "composed" not in name
    assert value["algorithm"] == "python:algorithm"
    assert value["composed"]["needs"] == file["composed"]["needs"] == needs
    assert value["hyperparameters"] == {}
    assert file["algorithm"] == f"{by_file.parent}/own.py:mine"
    assert file["hyperparameters"] == {"clip_high": 0.2, "temper": 1.0}


@pytest.mark.heavy
def test_what_reads_a_trained_model_does_not_need_the_algorithm(
    by_value: Path, by_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(by_file, tmp_path)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "algorithm": "/nowhere/own.py:mine"}))
    _, _, params, _ = load_run(str(by_value))
    runs.assert_equal_trees(params, runs.final_params(by_value))
    with pytest.raises(InputError, match=r"algorithm was .*, and is now '/nowhere/own.py:mine'"):  # but says a change
        load_run(str(run))
    runs.assert_equal_trees(load_run(str(run), accept_changed_inputs=True)[2], params)
    assert main(["report", str(by_value), "--compare", "rloo", f"{by_file.parent}/own.py:mine"]) == 0
    page = (by_value / "report.html").read_text().replace("<wbr>", "")
    assert "python:algorithm" in page
    assert f"{by_file.parent}/own.py:mine" in page


def test_a_value_goes_on_only_with_itself(
    by_value: Path, by_name: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(by_value, tmp_path, last=1)
    assert "was given by a Python program ('algorithm')" in refused(run, capsys)
    assert main(["train", "--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the run's algorithm was given by a Python program")
    assert said.count("\n") == 1
    assert "the algorithm changed" in refused(run, capsys, algorithm=algorithms.get("grpo", clip_high=0.3))
    assert "algorithm was 'python:algorithm', and is now 'python:mine'" in refused(run, capsys, algorithm=mine)
    runs.train(RunFolder(run).read_config(), resume=True, algorithm=algorithms.get("grpo"))
    runs.assert_equal_trees(runs.final_params(run), runs.final_params(by_name))


def test_another_algorithm_that_is_accepted_is_recorded(by_value: Path, tmp_path: Path) -> None:
    run = copied(by_value, tmp_path, last=1)
    other = algorithms.get("grpo", kl_coefficient=0.0)
    config = dataclasses.replace(RunFolder(run).read_config(), minibatches=2)
    runs.train(config, resume=True, algorithm=other, accept_changed_inputs=True)
    assert json.loads((run / "config.json").read_text())["composed"]["needs"] == sorted(other.needs)
    with pytest.raises(AssertionError):
        runs.assert_equal_trees(runs.final_params(run), runs.final_params(by_value))


def test_a_file_is_compared_as_rewards_are(
    by_file: Path, by_name: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = copied(by_file, tmp_path, last=1), by_file.parent / "own.py"
    try:
        file.write_text(FILE + "\n# another line\n")
        assert "the file of the algorithm changed" in refused(run, capsys)
        file.unlink()
        assert main(["train", "--resume", str(run)]) == 2
        assert capsys.readouterr().err.startswith(f"error: no file '{file}' for the algorithm")
    finally:
        file.write_text(FILE)
    assert in_commands("train", "--resume", str(run)) in (0, 1)
    runs.assert_equal_trees(runs.final_params(run), runs.final_params(by_name))


def test_problems_are_found_before_anything_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    plain, wrong = dataclasses.replace(config, hyperparameters={"clip_hihg": 0.3}), tmp_path / "own.py"
    wrong.write_text("def mine():\n    return 3\n")
    for changed, given, message in [
        (config, 3, "the algorithm is of the type int, not an Algorithm"),
        (config, entropy(), "of the type Objective, not an Algorithm"),
        (plain, mine, "unknown hyper-parameter of mine 'clip_hihg'"),
        (plain, algorithms.get("grpo"), "is a value, which has no hyper-parameters: leave out clip_hihg"),
        (config, f"{wrong}:mine", "own.py:mine returns of the type int, but must return an Algorithm"),
        (config, f"{wrong}:yours", "unknown name in .*own.py' 'yours'"),
        (config, algorithms.get("epo"), "the algorithm needs turns .*: use --environment"),
    ]:
        with pytest.raises(InputError, match=message):
            loop.train(changed, algorithm=given)
    assert not Path(config.output).exists()


def test_the_command_of_a_plan_leaves_out_what_it_cannot_name() -> None:
    given = TrainConfig(algorithm="python:mine", hyperparameters={"clip_high": 0.3}, group_size=4)
    assert changed_options(given) == ["--group-size=4"]


@pytest.mark.heavy
def test_a_critic_is_read_without_the_algorithm_that_had_it(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, steps=1, eval_size=0, critic="shared")
    runs.train(config, algorithm=algorithms.get("ppo"))
    _, policy, params, _ = load_run(config.output)
    assert policy.critic is not None
    assert "critic" not in params
