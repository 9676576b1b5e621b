"""jaxrl export refuses what would lose something, before it loads a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import load_policy
from jaxrl_llm.cli.program import main

MODEL = Path(__file__).parent / "vectors" / "llama"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What jaxrl train leaves, as far as it matters here: its model is a folder of its own."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    config = {"prompts_per_step": 4, "model": str(tmp_path / "base"), "prompts": "p.jsonl", "rewards": ["number_match"]}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "base").mkdir()
    for file in MODEL.iterdir():
        (tmp_path / "base" / file.name).symlink_to(file)
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """What a refused command says, in one line."""
    assert main(["export", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def tree(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading fails the test: what is refused here must be before."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("jaxrl_llm.training.folder.load_run.load_run", load)


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    "output, message",
    [
        ("run", "lies in .*run"),
        ("run/model", "lies in .*run"),
        ("run/checkpoints/0", "lies in .*run"),
        ("base", "lies in .*base"),
        ("base/new", "lies in .*base"),
        ("file", "is a file"),
        ("file/new", "since .*file is a file"),
        ("mine", "is not empty|is no file of a model"),
        (".", "is not empty|is no file of a model"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_refused(
    output: str, message: str, overwrite: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    (tmp_path / "file").write_text("x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    before = tree(tmp_path)
    assert re.search(message, said(capsys, run, tmp_path / output, *overwrite))
    assert tree(tmp_path) == before


@pytest.mark.usefixtures("no_model")
def test_another_run_is_no_place_for_a_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the folder of a run" in said(capsys, MODEL, run, "--overwrite")
    assert "the folder of a run" in said(capsys, MODEL, run / "model")


def test_a_model_is_exported_and_replaced_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    assert main(["export", str(MODEL), str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert load_policy(folder)[0] == load_policy(MODEL)[0]
    assert "--overwrite" in said(capsys, MODEL, folder)
    (folder / "tokenizer.json").unlink()
    assert main(["export", str(MODEL), str(folder), "--overwrite"]) == 0
    assert (folder / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_refusal_needs_no_jax(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    program = (
        "import sys; from jaxrl_llm.cli.program import main; status = main(sys.argv[1:]);"
        "print(status, 'jax' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "export", str(MODEL), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["2", "False", "False"]
    assert "is not empty" in done.stderr


@pytest.mark.parametrize("other", ["--keep-unread", "--adapters"])
@pytest.mark.usefixtures("no_model")
def test_tokens_are_not_added_to_what_has_the_old_vocabulary(
    other: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--add-tokens changes the vocabulary" in said(
        capsys, run, tmp_path / "new", other, "--add-tokens", "<short>"
    )
