"""Names of the library's modules, and of what is in them, where docstrings and pages mention them."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT

NAME = re.compile(r"`([a-z_][a-z_0-9]*(?:\.[A-Za-z_][A-Za-z_0-9]*)+)(?:\([^`]*)?`")
ENDINGS = {"html", "json", "jsonl", "md", "model", "npz", "parquet", "png", "py", "svg", "toml", "txt", "yaml"}
# Values of a run or a program, of which pages and docstrings name attributes, columns of data, and what others have.
VALUES = {
    "algorithm", "batch", "config", "context", "episode", "given", "league", "loop", "model", "old", "optimizer",
    "outputs", "path", "policy", "progress", "run", "score", "setup", "stored", "task", "tools", "trainer",
    "adapter_model", "experts", "extra_info", "file", "renderers", "reward_model", "rotary_emb", "str",
}  # fmt: skip


FOLDERS = ("", "jaxrl_llm", "jaxrl_llm/algorithms", "jaxrl_llm/models")  # from which pages say where a file is


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_in(tree: ast.Module) -> set[str]:
    """What a module defines or imports, also for type checkers alone."""
    found = set[str]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        else:
            found |= {one.asname or one.name for one in ast.walk(node) if isinstance(one, ast.alias)}
    return found


TREES = {
    ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): tree_of(path)
    for folder in (ROOT, ROOT / "kernels")
    for package in ("jaxrl_llm", "jaxrl_kernels")
    for path in (folder / package).rglob("*.py")
}
NAMES = {module: names_in(tree) for module, tree in TREES.items()}


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or what is in one, by a path from the library or from inside of it."""
    parts = name.split(".")
    for cut in range(1, len(parts) + 1):
        head = ".".join(parts[:cut])
        for module, names in NAMES.items():
            if f".{module}".endswith(f".{head}") and (cut == len(parts) or parts[cut] in names):
                return True
    return False


def unknown(text: str) -> set[str]:
    """The dotted names in backticks that are of no module, value, or other library."""
    found = {name for name in NAME.findall(text) if name.rsplit(".", 1)[1] not in ENDINGS}
    return {
        name
        for name in found
        if not exists(name) and (head := name.split(".")[0]) not in VALUES and importlib.util.find_spec(head) is None
    }


def docstrings(tree: ast.Module) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


def test_what_exists_is_found() -> None:
    text = "`core.reference.periodic_reset(5)` `reference.periodic_rest` `gone.name` `batch.info` `optax.adam` `a.json`"
    assert unknown(text) == {"reference.periodic_rest", "gone.name"}
    assert exists("jaxrl_llm.core.needs")
    assert not exists("rewards.shaping")


def test_docstrings_name_what_exists() -> None:
    assert {module: found for module, tree in TREES.items() if (found := unknown(docstrings(tree)))} == {}


@pytest.mark.parametrize("page", [one for one in PAGES if one.stem != "coming_from"], ids=lambda page: page.stem)
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text()
    assert unknown(text) == set()
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py)`", text)
    folders = re.findall(r"`((?:[a-z_]+/)+)`", text) if page.stem == "architecture" else []
    for path in [*files, *folders]:
        assert any((ROOT / folder / path).exists() for folder in FOLDERS), path


@pytest.mark.parametrize("notebook", sorted((ROOT / "colab").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_and_their_outputs_import_what_exists(notebook: Path) -> None:
    text = notebook.read_text()
    imports = re.findall(r"from (jaxrl_llm[\w.]*) import (\w+(?:, \w+)*)", text)
    assert imports or "import jaxrl_llm" in text
    for module, names in imports:
        for name in names.split(", "):
            assert name in NAMES[module] or f"{module}.{name}" in NAMES, f"{module}.{name}"


# Names that mean the same in two packages, or whose package says what they are.
SHARED = {
    "Comparison", "Engine", "Environment", "Experience", "Limits", "Population", "Task", "apart", "check_rows",
    "check_settings", "compare", "constructor", "family", "get", "given", "loaded", "names", "names_of", "prepare",
    "run", "score", "search", "shown", "softmax", "take", "update", "write_report",
}  # fmt: skip


def test_a_name_has_one_meaning() -> None:
    """No other module defines the name of a function or class that modules import, but for those of `SHARED`."""
    defined: dict[str, set[str]] = {}
    imported = set[tuple[str, str]]()
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.setdefault(node.name, set()).add(module)
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        imported |= {(str(node.module), one.name) for node in imports for one in node.names}
    several = {
        name: sorted(modules)
        for name, found in defined.items()
        if len(modules := {one for one in found if (one, name) in imported and one.startswith("jaxrl_llm.")}) > 1
    }
    assert set(several) == SHARED, [several.get(name, name) for name in set(several) ^ SHARED]
