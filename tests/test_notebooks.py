"""The notebooks under colab/ run from top to bottom in a real kernel, in a small setting."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "colab"
SMALL: dict[str, dict[str, Any]] = {
    "1_grpo_in_ten_minutes": {"STEPS": 1, "PROMPTS": 2, "SAMPLES": 2, "HELD_OUT": 4},
    "2_invent_a_method": {"ITERATIONS": 10, "SEEDS": 2, "WARM_STEPS": 10},
    "3_own_data_and_reward": {"STEPS": 1, "PROMPTS": 2, "SAMPLES": 2, "TOKENS": 8, "HELD_OUT": 4, "PASS_AT": 2},
    "5_from_notebook_to_pod": {"STEPS": 1, "MESH": "fsdp=2,tensor=4"},
}


def read(name: str) -> Any:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def tagged(notebook: Any, tag: str) -> Any:
    """The one cell with a tag."""
    (cell,) = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
    return cell


def with_values(source: str, values: dict[str, Any]) -> str:
    """The parameters' cell, followed by other values of some of them, which it must set."""
    found: dict[str, Any] = {}
    exec(source, found)
    assert values.keys() <= found.keys()
    return source + "".join(f"\n{name} = {value!r}" for name, value in values.items())


def test_every_notebook_is_run() -> None:
    assert sorted(SMALL) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", SMALL)
def test_what_github_shows(name: str) -> None:
    """Every cell was run, in order, and none failed; a line says how long the notebook takes."""
    notebook = read(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs) or name.startswith(("3", "5"))
    assert "minutes" in notebook.cells[0].source
    assert tagged(notebook, "install")
    with_values(tagged(notebook, "parameters").source, SMALL[name])


@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALL)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = read(name)
    cell = tagged(notebook, "parameters")
    cell.source = with_values(cell.source, SMALL[name])
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [text for text in texts if "Traceback" in text or "error:" in text]
