"""Which parts of the library, and which whole modules, serve one method alone.

    python experiments/users.py

A part is a public function with the decorator `part`; its users are the other files of the library in whose code its
name stands. A part outside algorithms/ with one user, a method's file, belongs into that file, unless it is offered for
composing: in the `__all__` of a package, README, docs or a notebook. Those that are offered are listed too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxrl_llm"
METHODS = PACKAGE / "algorithms"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "colab").glob("*.ipynb")))


def names_in(tree: ast.AST) -> set[str]:
    """The names that stand in code, as variables, attributes or imports."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {name.name for name in node.names}
    return found


def parts_of(tree: ast.Module) -> list[str]:
    """The public functions of a module with the decorator `part`."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return [f.name for f in functions if any(isinstance(d, ast.Name) and d.id == "part" for d in f.decorator_list)]


def imports_of(tree: ast.AST) -> set[str]:
    """The modules of the package that a file imports from, with dots."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def offered() -> set[str]:
    """The names that packages list, and the words of pages."""
    listed = set[str]()
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                listed |= set(ast.literal_eval(node.value))
    return listed.union(*(re.findall(r"\w+", page.read_text()) for page in PAGES))


def main() -> None:
    """Print the parts and modules outside algorithms/ that one method's file alone uses."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    names, imports = ({path: of(tree) for path, tree in trees.items()} for of in (names_in, imports_of))
    outside = [path for path in trees if METHODS not in path.parents]
    shown, of_one = offered(), list[tuple[str, str, str]]()
    parts = [(part, path) for path in outside for part in parts_of(trees[path])]
    for part, path in parts:
        users = [other for other in trees if other not in (path, path.parent / "__init__.py") and part in names[other]]
        if len(users) == 1 and METHODS in users[0].parents:
            of_one.append((part, path.relative_to(PACKAGE).as_posix(), users[0].relative_to(METHODS).as_posix()))
    rest = [one for one in of_one if one[0] not in shown]
    for title, some in (("offered for composing", [one for one in of_one if one not in rest]), ("not offered", rest)):
        print(f"{len(some)} parts of one method, {title}:")
        for part, place, user in some:
            print(f"  {part} ({place}): {user}")
    modules = list[tuple[str, str]]()
    for path in outside:
        name = "jaxrl_llm." + path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        users = [other for other in trees if other != path and name in imports[other]]
        if len(users) == 1 and METHODS in users[0].parents:
            modules.append((name, users[0].relative_to(METHODS).as_posix()))
    print(f"{len(modules)} modules that one method's file alone imports:")
    for name, user in modules:
        print(f"  {name}: {user}")
    print(f"of {len(parts)} parts and {len(outside)} modules outside algorithms/")


if __name__ == "__main__":
    main()
