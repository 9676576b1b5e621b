"""The wheel: it has all packages and data files, and works outside of the clone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import jaxrl_llm

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHERE = "import jaxrl_llm, jaxrl_kernels; print(jaxrl_llm.__file__, jaxrl_kernels.__file__, sep='\\n')"


def test_one_version_everywhere() -> None:
    assert jaxrl_llm.__version__ == PROJECT["version"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == PROJECT["version"]  # type: ignore[index]
    released = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released
    assert released[1] == PROJECT["version"]
    assert f'date-released: "{released[2]}"' in citation
    assert f"license: {PROJECT['license']}" in citation


def test_extras_are_described() -> None:
    described = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/install.md").read_text(), flags=re.MULTILINE)
    named = {name for cell in described for name in re.findall(r"`(\w+)`", cell)}
    assert set(PROJECT["optional-dependencies"]) <= named


def test_each_test_file_has_a_name_of_its_own() -> None:
    # pytest imports test files by their base names: of two equal ones it refuses the second.
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []


@pytest.mark.heavy
def test_a_wheel_works_outside_of_the_clone(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install -e '.[dev]'")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        packed = set(file.namelist())
    for package, folder in (("jaxrl_llm", ROOT), ("jaxrl_kernels", ROOT / "kernels")):
        files = [f for f in (folder / package).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
        assert {str(f.relative_to(folder)) for f in files} <= packed
    assert not any(name.startswith(("tests", "docs", "experiments")) for name in packed)

    # Beside the packages of this environment, in front of any other jaxrl_llm.
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    shutil.copytree(ROOT / "tests/vectors/llama_tied", tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}:", "answer": n}) + "\n" for n in range(8))
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert all(line.startswith(str(site)) for line in run(sys.executable, "-c", WHERE).splitlines())
    script = [sys.executable, str(site / "bin/jaxrl")]
    assert "train" in run(*script, "--help")
    assert "sum_i" in run(*script, "algorithms", "grpo")
    settings = {
        "--model": "model", "--prompts": "prompts.jsonl", "--rewards": "number_match", "--steps": "1",
        "--prompts-per-step": "2", "--group-size": "2", "--max-new-tokens": "4", "--eval-size": "0", "--output": "run",
    }  # fmt: skip
    run(*script, "train", *(word for pair in settings.items() for word in pair))
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 1
    assert "<html" in (tmp_path / "run/report.html").read_text()
