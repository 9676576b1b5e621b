"""jaxrl help, --version and demo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.cli import demo, info
from jaxrl_llm.cli.program import COMMANDS, main


def test_help_lists_the_commands_or_helps_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == main(["help"]) == 0
    first, second, third = capsys.readouterr().out.split("usage: jaxrl COMMAND")[1:]
    assert first == second == third
    for name in COMMANDS:
        assert f"\n  {name} " in first
    assert "jaxrl demo " in first
    assert main(["help", "export"]) == 0
    of_help = capsys.readouterr().out
    assert main(["export", "--help"]) == 0
    assert capsys.readouterr().out == of_help
    assert main(["help", "trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err
    assert main(["help", "train", "eval"]) == 2
    assert "remove eval" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 0
    assert capsys.readouterr().out == f"jaxrl_llm {jaxrl_llm.__version__} (Python {sys.version.split()[0]})\n"


def test_the_demo_needs_no_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(demo, "run", lambda *given: asked.append(given))
    monkeypatch.setattr("jaxrl_llm.models.io.folders.check_source", lambda model: None)
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == main(["demo", "--seed", "2", "--steps=3", "--output", "b", "--model", "m"]) == 0
    assert asked == [("smollm2-135m", 0, "runs/demo", 9, "float32"), ("m", 2, "b", 3, "float32")]


def test_the_demo_finds_what_is_missing_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", lambda *given: pytest.fail("the demo ran"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps({"prompts_per_step": 4}))
    assert main(["demo", "--output", "old", "--model", "./none"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[2][:12] for line in errors] == ["'./none' is ", "old holds a "]
    find = info.importlib.util.find_spec
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find(name))
    assert main(["demo", "--steps", "0"]) == 2
    steps, package = capsys.readouterr().err.splitlines()
    assert "--steps is 0" in steps
    assert "the demo needs the package 'reasoning-gym': pip install 'jaxrl_llm[demo]'" in package
