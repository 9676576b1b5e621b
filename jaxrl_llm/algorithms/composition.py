"""The source of a method as a standalone file: imports, helpers of its module, and the function without its facts."""

import ast
import copy
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import jaxrl_llm.advantages.functional
import jaxrl_llm.objectives.functional
import jaxrl_llm.selection.functional  # noqa: F401  (imported, so that all doors are)
from jaxrl_llm.algorithms import families
from jaxrl_llm.core import annotations
from jaxrl_llm.core.arguments import ranges

PACKAGES = ("advantages", "objectives", "selection")
# Modules whose names stay, from which a composition imports.
DOORS = (
    "jaxrl_llm",
    "jaxrl_llm.algorithms",
    *(f"jaxrl_llm.{name}{kind}" for name in PACKAGES for kind in ("", ".functional")),
)


def composition(build: Callable[..., Any]) -> str:
    """A standalone program that ends with `algorithm = NAME()`, the method with its defaults.

    It has one import line per module, with only the names that it uses, from `DOORS` where they have them.
    """
    build = inspect.unwrap(build)
    lines, module, imports = _module(build.__module__)
    wanted, found = [build.__name__], dict[str, ast.stmt]()
    names = set[str]()
    while wanted:
        name = wanted.pop()
        node = module.get(name)
        if node is None or name in found:
            continue
        found[name] = node = _without_facts(node) if name == build.__name__ else node
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - {name}
        names |= used
        wanted += sorted(used)
    # One statement may bind several names, so remove duplicates.
    statements = dict.fromkeys(sorted(found.values(), key=lambda node: node.lineno))
    body = [_source(node, lines, of_method=node is found[build.__name__]) for node in statements]
    heads = ["from __future__ import annotations"], _imports(names & set(imports), imports)
    return (
        "\n\n".join("\n".join(lines) for lines in heads if lines)
        + "\n\n\n"
        + "\n\n\n".join(body)
        + (f"\n\n\nalgorithm = {build.__name__}()\n")
    )


@cache
def _module(name: str) -> tuple[list[str], dict[str, ast.stmt], dict[str, tuple[str, str | None]]]:
    """A module's lines, the statements that bind its own names, and the origins of its imported names."""
    text = inspect.getsource(sys.modules[name])
    bound, imported = dict[str, ast.stmt](), dict[str, tuple[str, str | None]]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = getattr(node, "module", None) or ""
            for alias in node.names if source != "__future__" else ():
                imported[alias.asname or alias.name.partition(".")[0]] = (source, _renamed(alias))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
            bound |= {one.id: node for one in names}
    return text.splitlines(), bound, imported


class _Plain(ast.NodeTransformer):
    """Types without the facts of `Annotated`, nor the origins of defaults."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        if name == "Annotated" and isinstance(node.slice, ast.Tuple):
            return ast.copy_location(self.visit(node.slice.elts[0]), node)
        if get_origin(getattr(annotations, name, None)) is Annotated:  # `Paper[...]`, say
            return ast.copy_location(self.visit(node.slice), node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        kind = getattr(ranges, node.id, None)
        plain = get_args(kind)[0].__name__ if get_origin(kind) is Annotated else node.id
        return ast.copy_location(ast.Name(plain, ast.Load()), node)


def _without_facts(node: ast.stmt) -> ast.stmt:
    """A method's function without its facts, and with plain annotations, each at the place of the one in the source."""
    if not isinstance(node, ast.FunctionDef):
        return node
    node = copy.deepcopy(node)
    node.decorator_list = [one for one in node.decorator_list if _called(one) not in ("method", "beside", "run_needs")]
    for one in (*node.args.args, *node.args.kwonlyargs):
        one.annotation = None if one.annotation is None else _Plain().visit(one.annotation)
    return node


def _called(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _renamed(one: ast.alias) -> str:
    return one.name if one.asname is None else f"{one.name} as {one.asname}"


def _imports(names: set[str], imported: dict[str, tuple[str, str | None]]) -> list[str]:
    """The import lines for these names: `import` lines first, then `from` lines sorted by module."""
    whole, by_module = list[str](), dict[str, list[str]]()
    for name in sorted(names):
        module, what = imported[name]
        if module:
            by_module.setdefault(_door(module, name) if what == name else module, []).append(str(what))
        else:
            whole.append(f"import {what}")
    return whole + [f"from {module} import {', '.join(sorted(by_module[module]))}" for module in sorted(by_module)]


def _door(module: str, name: str) -> str:
    """The door that has a name of a module, else the module."""
    if families().get(name) and module.endswith(f".{name}"):
        return "jaxrl_llm.algorithms"
    value = getattr(sys.modules.get(module), name, None)
    for door in map(sys.modules.__getitem__, DOORS):
        if name in door.__all__ and getattr(door, name) is value:
            return door.__name__
    return module


def _source(node: ast.stmt, lines: list[str], of_method: bool) -> str:
    """A statement's source without docstrings: the page shows the method's separately."""
    lines = list(lines)
    if of_method and isinstance(node, ast.FunctionDef):
        for one in reversed((*node.args.args, *node.args.kwonlyargs)):  # from the right: several may be on a line
            if (kind := one.annotation) is not None:
                line = lines[kind.lineno - 1]
                lines[kind.lineno - 1] = line[: kind.col_offset] + ast.unparse(kind) + line[kind.end_col_offset :]
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(one.lineno for one in decorators)]) - 1
    kept = list(range(first, node.end_lineno or node.lineno))
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            texts = [one for one in inner.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
            if len(texts) == len(inner.body) and not (of_method and inner is node):
                lines[texts[0].lineno - 1] = " " * texts[0].col_offset + "pass"
                texts[0].end_lineno, texts[0].lineno = texts[0].end_lineno, texts[0].lineno + 1
            for said in texts:
                kept = [i for i in kept if not said.lineno - 1 <= i < (said.end_lineno or said.lineno)]
    while kept and not lines[kept[-1]].strip():
        kept.pop()
    text = [lines[i] for i in kept]
    # Remove the empty line after the docstring too.
    return "\n".join(line for i, line in enumerate(text) if line.strip() or not text[i - 1].rstrip().endswith(":"))
