"""What the README and the experiments show is run: its example, the plain script, the demo."""

import asyncio
import re
import runpy
import sys
from pathlib import Path

import pytest

from jaxrl_llm import algorithms

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "tests/vectors/llama_tied")


def code_lines(text: str) -> int:
    return len([line for line in text.splitlines() if line.strip()])


def test_readme_example(capsys: pytest.CaptureFixture[str], smollm2: object) -> None:
    first, program, second = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert code_lines(first) <= 15
    names: dict[str, object] = {}
    exec(compile(first, "README.md", "exec"), names)  # the example itself is under test
    printed = capsys.readouterr().out
    assert printed.startswith("[")
    assert printed.count(",") >= 3
    assert "reference_logp" in names["grpo"].needs  # type: ignore[attr-defined]
    assert names["batch"].tokens.shape[0] == 4  # type: ignore[attr-defined]
    exec(compile(program, "README.md", "exec"), names)
    assert asyncio.iscoroutinefunction(names["pairs"])
    exec(compile(second, "README.md", "exec"), names)
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["row", "group", "reward", "actions", "grpo", "dapo", "mine"]
    assert f"has {len(algorithms.names())} published methods" in (ROOT / "README.md").read_text()
    for definition in re.findall(r"^(?:grpo|dapo|mine) = \w+\(\n(.*?)^\)", second, flags=re.DOTALL | re.MULTILINE):
        assert code_lines(definition) <= 5


def test_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / path).exists(), path


def test_plain_script_trains() -> None:
    script = ROOT / "experiments/grpo_from_parts.py"
    assert len(script.read_text().splitlines()) <= 60
    main = runpy.run_path(str(script))["main"]
    state, accuracies = main(model=TINY, steps=2, prompts_per_step=2, group_size=2, eval_size=4)
    assert int(state.step) == 4  # two steps of two minibatches
    assert all(0 <= a <= 1 for a in accuracies)


@pytest.mark.heavy
def test_demo_runs_and_prints_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quickstart.py", "--model", TINY, "--steps", "1", "--output", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "experiments/quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for word in ("before  accuracy", "after   accuracy", "percentage points", "report.html"):
        assert word in printed
    assert printed.count("State the final answer") >= 3
    assert (tmp_path / "run/report.html").exists()
