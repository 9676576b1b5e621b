"""The hyper-parameters of the catalogue's methods, read from their source: importing it takes JAX and its seconds."""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_llm.errors import unknown

_KINDS = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple, "Literal": Literal}


class Hyperparameter(NamedTuple):
    """One parameter of a method."""

    name: str
    kind: Any  # its annotation
    default: Any


def hyperparameters(method: str) -> list[Hyperparameter]:
    """Those of a method of `algorithms.names()`, in order. InputError, with the nearest name, for another."""
    known = _methods()
    if method not in known:
        added = getattr(sys.modules.get("jaxrl_llm.algorithms"), "CATALOGUE", {})  # of this process
        if method not in added:
            raise unknown("algorithm", method, [*known, *added])
        hints, parameters = typing.get_type_hints(added[method]), inspect.signature(added[method]).parameters
        return [Hyperparameter(one.name, hints[one.name], one.default) for one in parameters.values()]
    arguments = known[method].args
    found = []
    for argument, default in zip(arguments.args, arguments.defaults, strict=True):
        assert argument.annotation is not None  # each is annotated; a test compares all with `inspect.signature`
        kind = eval(compile(ast.Expression(argument.annotation), method, "eval"), {"__builtins__": {}}, _KINDS)
        found.append(Hyperparameter(argument.arg, kind, ast.literal_eval(default)))
    return found


@cache
def _methods() -> dict[str, ast.FunctionDef]:
    """The functions that the modules of `algorithms` list in `__all__`, by name."""
    found: dict[str, ast.FunctionDef] = {}
    for path in sorted((Path(__file__).parent / "algorithms").glob("*.py")):
        if path.name == "__init__.py":
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        public = [ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign) and _is_all(node)]
        names = {name for listed in public for name in listed}
        found |= {node.name: node for node in body if isinstance(node, ast.FunctionDef) and node.name in names}
    return found


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
