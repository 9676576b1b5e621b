"""The hyper-parameters of methods, parsed from their source where that will do, because importing them imports JAX."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxrl_llm.core import choices
from jaxrl_llm.utils.errors import InputError, unknown
from jaxrl_llm.utils.peer_names import COMMANDS

CATALOGUE = Path(__file__).parents[1] / "algorithms"
_CHOICES = {name: kind for name, kind in vars(choices).items() if typing.get_origin(kind) is Literal}
_KINDS = {**_CHOICES, "bool": bool, "int": int, "float": float, "str": str, "tuple": tuple, "Literal": Literal}
_PLAIN = (bool, int, float, str)
PYTHON = "python:"  # begins the name of an algorithm that a Python program gave to a run
NOT_GIVEN = (
    "the run's algorithm was given by a Python program ({0!r}), and is in no file: resume it there, with "
    "train(Run(FOLDER).config, resume=True, algorithm={0})"
)


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
            raise unknown_method(method, {*known, *added})
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


def unknown_method(name: str, known: Iterable[str]) -> InputError:
    """The error for an unknown method: what is there instead of one that is no reinforcement learning, or the nearest.

    >>> str(unknown_method("gropo", ["grpo"]))
    "unknown algorithm 'gropo': did you mean 'grpo'? Known: grpo"
    """
    here = COMMANDS.get(name, "")
    return (
        InputError(f"the algorithm {name} is {here}")
        if here.startswith("not here")
        else unknown("algorithm", name, known)
    )


def is_in_file(method: str) -> bool:
    """Whether a method's name is path/to/file.py:NAME or package.module:NAME, rather than one of the catalogue."""
    return ":" in method or method.endswith(".py")


def of_function(function: Callable[..., Any], label: str) -> list[Hyperparameter]:
    """The hyper-parameters of a function that can be given as text: numbers, texts, choices, or a tuple of these.

    Without an annotation the type is that of the default; without a default it is None. label: names the function in
    errors. Others are left out if they have a default; InputError if not.
    """
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # names that only a type checker imports
        hints = {}
    found = []
    for one in inspect.signature(function).parameters.values():
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            required = one.default is one.empty
            made = _as_text(one.name, hints.get(one.name, one.empty), one.empty if required else one.default)
            if made is not None:
                found.append(made)
            elif required:
                raise InputError(
                    f"the hyper-parameter {one.name} of {label} has neither a default nor a type that a text can give: "
                    f"annotate it, {one.name}: float"
                )
    return found


def in_file(path: Path, name: str) -> list[Hyperparameter] | None:
    """`of_function` of a plain function in a file, from its source; None where only running the file would tell."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # loading says what is wrong
        return None
    bound = [node for node in body if name in _bound(node)]
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef) or bound[0].decorator_list:
        return None
    arguments, found = bound[0].args, list[Hyperparameter]()
    listed = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(listed) - len(arguments.defaults)) + list(arguments.defaults) + arguments.kw_defaults
    for argument, default in zip([*listed, *arguments.kwonlyargs], defaults, strict=True):
        kind: Any = inspect.Parameter.empty
        try:
            value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
            if argument.annotation is not None:
                kind = eval(compile(ast.Expression(argument.annotation), name, "eval"), {"__builtins__": {}}, _KINDS)
                kind = eval(kind, {"__builtins__": {}}, _KINDS) if isinstance(kind, str) else kind
        except Exception:  # of a name that the file imports or defines
            return None
        made = _as_text(argument.arg, kind, value)
        if made is None:
            return None
        found.append(made)
    return found


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement binds, as far as they can be read."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _as_text(name: str, kind: Any, default: Any) -> Hyperparameter | None:
    """A hyper-parameter that a text can give; None if it is none."""
    empty = inspect.Parameter.empty
    if kind is empty:
        kind = type(default)
        if default is None or kind not in _PLAIN:
            return None
    inner = [one for one in typing.get_args(kind) if one not in (type(None), Ellipsis)]
    origin = typing.get_origin(kind)
    if kind not in _PLAIN and origin is not Literal and not (inner and all(one in _PLAIN for one in inner)):
        return None
    if origin not in (None, Literal, tuple, typing.Union, types.UnionType):
        return None
    return Hyperparameter(name, kind | None, None) if default is empty else Hyperparameter(name, kind, default)


def options(method: str, preset: str | None = None) -> list[Hyperparameter]:
    """`hyperparameters`, and `without` for methods that lack a part in some runs (see `algorithms.unfinished`)."""
    without = [Hyperparameter("without", str, "")] if method in _unfinished() else []
    return hyperparameters(method, preset) + without


def known_methods() -> frozenset[str]:
    """The names of all methods."""
    return frozenset([*_methods(), *getattr(sys.modules.get("jaxrl_llm.algorithms"), "CATALOGUE", {})])


def method_source(method: str) -> str:
    """The docstring of a method, of a function in a file too, which is only read; "" if there is none.

    Raises InputError for an unknown method of the catalogue, as `hyperparameters`.
    """
    if is_in_file(method):
        return _docstring_in(method)
    if method in _methods():
        return ast.get_docstring(_methods()[method]) or ""
    hyperparameters(method)  # raises for an unknown one
    return inspect.getdoc(sys.modules["jaxrl_llm.algorithms"].CATALOGUE[method]) or ""


def _docstring_in(method: str) -> str:
    """The docstring of a function that path/to/file.py:NAME names."""
    path, _, name = method.rpartition(":")
    try:
        body = ast.parse(Path(path).expanduser().read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # a module, or what loading says is wrong
        return ""
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return ast.get_docstring(found[-1]) or "" if found else ""


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
