"""The hyper-parameters of the catalogue's methods, parsed from source, because importing the methods imports JAX."""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_llm.errors import unknown

CATALOGUE = Path(__file__).parent / "algorithms"
_KINDS = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple, "Literal": Literal}


class Hyperparameter(NamedTuple):
    """One parameter of a method."""

    name: str
    kind: Any  # its annotation
    default: Any


def hyperparameters(method: str, preset: str | None = None) -> list[Hyperparameter]:
    """The hyper-parameters of a method of `algorithms.names()`, in order, with the values of a preset as defaults.

    Raises InputError, with the nearest name, for an unknown method or preset.
    """
    known = _methods()
    if method not in known:
        added = getattr(sys.modules.get("jaxrl_llm.algorithms"), "CATALOGUE", {})  # registered in this process
        if method not in added:
            raise unknown("algorithm", method, [*known, *added])
        hints, parameters = typing.get_type_hints(added[method]), inspect.signature(added[method]).parameters
        return [Hyperparameter(one.name, hints[one.name], one.default) for one in parameters.values()]
    arguments, sets = known[method].args, _presets(known[method])
    if preset is not None and preset not in sets:
        raise unknown(f"preset of {method}", preset, sets)
    values = {} if preset is None else sets[preset]
    found = []
    for argument, default in zip(arguments.args, arguments.defaults, strict=True):
        assert argument.annotation is not None  # each is annotated; a test compares all with `inspect.signature`
        kind = eval(compile(ast.Expression(argument.annotation), method, "eval"), {"__builtins__": {}}, _KINDS)
        found.append(Hyperparameter(argument.arg, kind, values.get(argument.arg, ast.literal_eval(default))))
    if sets:
        found.append(Hyperparameter("preset", Literal[tuple(sets)] | None, preset))
    return found


def options(method: str, preset: str | None = None) -> list[Hyperparameter]:
    """`hyperparameters`, and `without` for methods that lack a part in some runs (see `algorithms.unfinished`)."""
    without = [Hyperparameter("without", str, "")] if method in _unfinished() else []
    return hyperparameters(method, preset) + without


def known_methods() -> frozenset[str]:
    """The names of all methods."""
    return frozenset([*_methods(), *getattr(sys.modules.get("jaxrl_llm.algorithms"), "CATALOGUE", {})])


def method_source(method: str) -> str:
    """The docstring of a method; "" if it has none. InputError for an unknown method, as `hyperparameters`."""
    if method in _methods():
        return ast.get_docstring(_methods()[method]) or ""
    hyperparameters(method)  # raises for an unknown one
    return inspect.getdoc(sys.modules["jaxrl_llm.algorithms"].CATALOGUE[method]) or ""


def _presets(method: ast.FunctionDef) -> dict[str, dict[str, Any]]:
    """The presets in a method's decorator `algorithms.presets.presets`, by name."""
    calls = [one for one in method.decorator_list if isinstance(one, ast.Call)]
    return {
        keyword.arg: ast.literal_eval(keyword.value)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "presets"
        for keyword in call.keywords
        if keyword.arg
    }


@cache
def _unfinished() -> frozenset[str]:
    """The methods that lack something: the keys of UNFINISHED and NEEDED in `algorithms.unfinished`."""
    found: set[str] = set()
    for node in ast.parse((CATALOGUE / "unfinished.py").read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and getattr(node.target, "id", "") in ("UNFINISHED", "NEEDED")
            and node.value
        ):
            found |= ast.literal_eval(node.value).keys()
    return frozenset(found)


@cache
def _methods() -> dict[str, ast.FunctionDef]:
    """The functions that the modules of `algorithms` list in `__all__`, by name."""
    found: dict[str, ast.FunctionDef] = {}
    for path in sorted(CATALOGUE.glob("*.py")):
        if path.name == "__init__.py":
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        public = [ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign) and _is_all(node)]
        names = {name for listed in public for name in listed}
        found |= {node.name: node for node in body if isinstance(node, ast.FunctionDef) and node.name in names}
    return found


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
