"""What a run was started with is written beside its settings, and never stands in the way of anything."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxrl_llm
from jaxrl_llm.cli.program import main
from jaxrl_llm.training.folder import provenance as module
from jaxrl_llm.training.folder.provenance import NAME, PACKAGES, commit, environment, record_start


def test_versions_devices_and_commit() -> None:
    found = environment()
    assert found["packages"]["jax"] == jax.__version__
    assert set(found["packages"]) == set(PACKAGES)
    assert sum(found["devices"].values()) == jax.device_count()
    assert found["jaxrl_llm"] == jaxrl_llm.__version__
    json.dumps(found)


def test_the_commit_is_that_of_this_clone_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment may lie in the clone of another project."""

    def git(*arguments: str) -> str:
        own = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *own, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    package = tmp_path / "jaxrl_llm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(module, "LIBRARY", package)
    assert commit() is None
    git("init", "-q")
    assert commit() is None, "another project's clone"
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert commit() == head
    (package / "__init__.py").write_text("changed = True\n")
    assert commit() == head + "+"


def test_every_start_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["jaxrl", "train", "--steps", "3"])
    record_start(tmp_path, 0)
    record_start(tmp_path, 2)
    starts = json.loads((tmp_path / NAME).read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 2]
    assert starts[0]["command"] == ["train", "--steps", "3"]
    assert datetime.fromisoformat(starts[0]["date"]).tzinfo is not None
    assert starts[0]["packages"]["jax"] == jax.__version__


@pytest.mark.parametrize("content", ['{"starts": 3}', "{", "[]", '{"starts": null}'])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    record_start(tmp_path, 5)
    assert [start["step"] for start in json.loads((tmp_path / NAME).read_text())["starts"]] == [5]


def test_a_file_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    record_start(tmp_path / "nowhere", 0)
    assert not (tmp_path / "nowhere").exists()


def test_env_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert ["jax", jax.__version__] in [line.split() for line in text.splitlines()]
    assert "devices" in text
    assert main(["env", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["packages"]["jax"] == jax.__version__
