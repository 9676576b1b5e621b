"""First commands of users of TRL, verl and Tunix: each does what it does there, or says what to write instead."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from experiments.first_commands import COMMANDS, FILES, First, write_files
from jaxrl_llm.cli import commands
from jaxrl_llm.cli.peer_options import method_name, translated, unknown_command
from jaxrl_llm.cli.peer_overrides import TUNIX_OTHER, TUNIX_SAME, VERL_OTHER, VERL_SAME
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.arguments.signatures import known_methods
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.peer_names import TRL_FLAGS, TRL_OTHER, TRL_SAME


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TrainConfig]:
    """The configurations that `jaxrl train` would train with, in a folder with the files that the commands name."""
    found: list[TrainConfig] = []

    def train(config: TrainConfig, *others: object) -> int:
        found.append(config)
        return 0

    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "_train", train)
    return found


def test_there_are_enough_commands_of_each() -> None:
    assert len({first.typed for first in COMMANDS}) == len(COMMANDS) >= 40
    for first in COMMANDS:
        assert sum(map(bool, (first.here, first.prints, first.says))) == 1, first.typed


@pytest.mark.parametrize("first", [one for one in COMMANDS if one.here], ids=lambda one: one.typed)
def test_it_does_what_it_does_there(first: First, configs: list[TrainConfig]) -> None:
    assert main(shlex.split(first.typed)) == main(shlex.split(first.here)) == 0
    assert configs[0] == configs[1]
    assert configs[0] != TrainConfig()


@pytest.mark.parametrize("first", [one for one in COMMANDS if one.says], ids=lambda one: one.typed)
def test_it_says_what_to_write_instead(
    first: First, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(first.typed)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not line.startswith("here ")]
    assert all(line.startswith("error: ") for line in lines)
    assert len(lines) <= 2
    assert re.search(first.says, " ".join(lines))
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}, "nothing was written"


@pytest.mark.parametrize("first", [one for one in COMMANDS if one.prints], ids=lambda one: one.typed)
def test_it_prints(first: First, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(first.typed)) == 0
    assert re.search(first.prints, capsys.readouterr().out)


def test_what_was_read_is_said_in_one_line(configs: list[TrainConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--lr", "1e-5", "--num_generations=4", "--bf16"]) == 0
    assert capsys.readouterr().err == (
        "here --lr is --optimizer.learning-rate, --num_generations is --group-size, --bf16 is --dtype bfloat16\n"
    )
    assert main(["train", "--group-size", "4"]) == 0
    assert capsys.readouterr().err == "", "the names here need no word"


def test_every_name_leads_to_an_option_that_exists() -> None:
    """Of the method where it is one of a method: some method has it."""
    from jaxrl_llm.cli.options import _command, _options_of
    from jaxrl_llm.core.arguments.signatures import options

    own = {option for option in _options_of(_command("grpo", options("grpo")))} | {"--resume"}
    own |= {f"--algorithm.{one.name.replace('_', '-')}" for name in known_methods() for one in options(name)}
    for table in (TRL_SAME, VERL_SAME, TUNIX_SAME):
        for name, same in table.items():
            assert same.option in own, name
    for yes, no in TRL_FLAGS.values():
        assert {yes[0], no[0].replace("--no-", "--")} <= own
    for others in (TRL_OTHER, VERL_OTHER, TUNIX_OTHER):
        for name, text in others.items():
            for option in re.findall(r"(?<![\w-])--[a-z][\w.-]+[a-z]", text):
                option = option.replace("--no-", "--")
                assert option in own | {"--config"}, (name, option)


def test_no_name_is_read_as_another_setting_of_its_name() -> None:
    """What has a name here is never translated; `beta` is the KL penalty's, and no moment of Adam's."""
    assert not set(TRL_SAME) & set(TrainConfig.__dataclass_fields__)
    assert translated(["--beta", "0.1"]) == (
        ["--algorithm.kl-coefficient", "0.1"], ["--beta is --algorithm.kl-coefficient"]
    )  # fmt: skip
    with pytest.raises(InputError, match="which dapo does not have") as caught:
        translated(["--algorithm", "dapo", "--beta", "0.1"])
    assert "beta1" not in str(caught.value)
    for text in ("--algorithm=trpa", "--algorithm=TRPA"):  # a method with a beta of its own
        with pytest.raises(InputError, match="leave it out"):
            translated([text, "--beta", "0.1"])


def test_values_that_look_like_overrides_are_left_alone() -> None:
    arguments = ["--prompt-template", "data.seed=3 {prompt}", "--stop=--beta", "--mesh", "data=2,fsdp=4"]
    assert translated(arguments) == (arguments, [])


def test_a_data_set_in_parts_needs_its_name() -> None:
    with pytest.raises(InputError, match="part of its name here: --prompts OWNER/NAME:main/train"):
        translated(["--dataset_config", "main"])
    assert translated(["--prompts=a/b", "--dataset_split", "test"])[0] == ["--prompts=a/b:test"]


@pytest.mark.parametrize("name", ["GRPO", "Grpo", "dr-grpo", "DrGRPO", "REINFORCE++", "Dr.GRPO", "GSPO"])
def test_methods_are_known_in_other_spellings(name: str) -> None:
    assert method_name(name) in known_methods()


def test_names_that_nobody_has_are_left_to_be_suggested() -> None:
    assert method_name("gropo") == "gropo"
    assert "did you mean 'train'" in str(unknown_command("trian", ["train", "eval"]))
    assert "jaxrl train --algorithm dapo" in str(unknown_command("DAPO", ["train"]))
