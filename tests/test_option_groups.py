"""The help of jaxrl train: all settings in groups, and every hyper-parameter described."""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.cli import option_groups
from jaxrl_llm.cli.option_groups import GROUPS, SHARED, parameter_doc, setting_docs
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.arguments.signatures import options
from jaxrl_llm.learner.optimizer_config import OptimizerConfig
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.hyperparameters import options_of


def test_the_examples_hold() -> None:
    assert doctest.testmod(option_groups).failed == 0


def test_every_setting_is_in_one_group() -> None:
    listed = [name for _, names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert fields ^ {*listed, "optimizer", "hyperparameters"} == set()


def test_every_setting_is_described_in_sentences() -> None:
    for kind in (TrainConfig, OptimizerConfig):
        docs = setting_docs(kind)
        for field in dataclasses.fields(kind):
            text = docs[field.name]
            assert text.endswith("."), field.name
            assert "\n" not in text


@pytest.mark.parametrize("method", algorithms.names())
def test_every_hyperparameter_is_described(method: str) -> None:
    for one in options(method):
        text = parameter_doc(one)
        assert len(text) > 10, f"{method}: {one.name} has no description: mention it in the docstring"
        assert len(text) <= 320


def test_a_method_in_a_file_is_described_by_its_docstring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def mine(strength: float = 0.5, other: int = 2):\n"
        '    """A method.\n\n    `strength` weighs the bonus, which is new. The rest is old.\n    """\n'
    )
    said = {one.name: parameter_doc(one) for one in options_of(f"{file}:mine")}
    assert said == {"strength": "`strength` weighs the bonus, which is new.", "other": ""}
    assert main(["train", "--algorithm", f"{file}:mine", "--help"]) == 0
    text = " ".join(re.sub(r"[│|]", " ", capsys.readouterr().out).split())
    assert "--algorithm.strength" in text
    assert "weighs the bonus" in text


def test_descriptions_that_all_methods_share_are_of_names_that_several_have() -> None:
    names = [one.name for method in algorithms.names() for one in options(method)]
    assert not [name for name in SHARED if name not in names]


def test_the_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--algorithm", "dapo", "--help", "all"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f" {name} options ") for name in GROUPS]
    assert places == sorted(places)
    plain = " ".join(re.sub(r"[│|]", " ", text).split())
    for about, _ in GROUPS.values():
        assert about in plain
    for one in options("dapo"):
        assert f"--algorithm.{one.name.replace('_', '-')}" in plain
        assert parameter_doc(one)[:30] in plain
    assert "Hyper-parameters of dapo" in plain
    assert main(["train", "--help", "all", "--algorithm=GRPO"]) == 0
    assert "Hyper-parameters of grpo" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "own"), [("train", "--resume RUN"), ("plan", "--topology TOPOLOGY")])
def test_the_short_help_has_what_most_runs_change_and_the_methods_own(
    command: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help", "--algorithm", "gspo"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 80
    assert max(map(len, text.splitlines())) <= 120
    for option in (own, "--model", "--prompts", "--rewards", "--optimizer.learning-rate", "--algorithm.clip-high"):
        assert f"  {option} " in text
    assert "--hang-factor" not in text
    assert f"jaxrl {command} --help all describes" in text
    assert main(["help", command]) == 0
    assert f"usage: jaxrl {command} " in capsys.readouterr().out
    assert main(["help", command, "all"]) == 0
    assert "--hang-factor" in capsys.readouterr().out


def test_positional_arguments_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    for command, usage in (("eval", "MODEL"), ("sample", "MODEL [PROMPT ...]"), ("export", "MODEL FOLDER")):
        assert main([command, "--help"]) == 0
        assert usage in capsys.readouterr().out.splitlines()[0]
