"""Methods' names and hyper-parameters without importing JAX: from `algorithms/catalogue.json`.

`python -m jaxrl_llm.algorithms.index` writes that file from the methods themselves, and a test compares them.
"""

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jaxrl_llm.core.arguments.hyperparameters import TYPE_NAMES, Hyperparameter, hyperparameters_of
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.utils.errors import InputError, unknown
from jaxrl_llm.utils.peer_names import COMMANDS

CATALOGUE = Path(__file__).parents[2] / "algorithms" / "catalogue.json"
PYTHON = "python:"  # begins the name of an algorithm that a Python program gave to a run
NOT_GIVEN = (
    "the run's algorithm was given by a Python program ({0!r}), and is in no file: resume it there, with "
    "train(Run(FOLDER).config, resume=True, algorithm={0})"
)
TEXT_METHODS = ("contextevolve", "polca", "spo_prompt", "training_free_grpo")  # files of jaxrl_llm/texts/methods
_TYPES = {kind.__name__: kind for kind in TYPE_NAMES}


def hyperparameters(method: str, preset: str | None = None) -> list[Hyperparameter]:
    """The hyper-parameters of a method of `algorithms.names()`, in order, with the values of a preset as defaults.

    Raises InputError, with the nearest name, for an unknown method or preset.
    """
    known = _methods()
    if method not in known:
        added = _added()  # in this process, or not in the file yet
        if method not in added:
            raise unknown_method(method, {*known, *added})
        return hyperparameters_of(added[method])
    sets = known[method].get("presets", {})
    if preset is not None and preset not in sets:
        raise unknown(f"preset of {method}", preset, sets)
    values = {"preset": preset, **sets[preset]} if preset is not None else {}
    return [_read(one, values) for one in known[method]["hyperparameters"]]


def has_settings(method: str) -> bool:
    """Whether a method of the catalogue takes settings of a run, see `algorithms.method.run_settings`."""
    return bool(_methods().get(method, {}).get("settings"))


def as_record(one: Hyperparameter) -> dict[str, Any]:
    """A hyper-parameter for `catalogue.json`."""
    # Sorted: types with the same choices are one object, whose order is that of the first import.
    kind = {"choices": sorted(one.choices)} if one.choices else {"type": one.type.__name__}
    optional = {"optional": True} if one.is_optional else {}
    return {"name": one.name, **kind, **optional, **one.range.limits, "default": one.default, "help": one.help}


def _read(record: Mapping[str, Any], values: Mapping[str, Any]) -> Hyperparameter:
    kind = Literal[tuple(record["choices"])] if "choices" in record else _TYPES[record["type"]]
    limits = Range(**{name: record[name] for name in Range._fields if name in record})
    default = values.get(record["name"], record["default"])
    optional = kind | None if record.get("optional") else kind
    return Hyperparameter(record["name"], optional, default, limits, help=record["help"])


def unknown_method(name: str, known: Iterable[str]) -> InputError:
    """The error for an unknown method: what is there instead of one that is no reinforcement learning, or the nearest.

    >>> str(unknown_method("gropo", ["grpo"]))
    "unknown algorithm 'gropo': did you mean 'grpo'? Known: grpo"
    """
    here = COMMANDS.get(name, "")
    if name in TEXT_METHODS:
        return InputError(f"{name} optimises a text and trains no weights: run it with jaxrl texts {name}")
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
    found, open_ended = [], (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    kinds = {one.name: one.kind for one in inspect.signature(function).parameters.values()}
    docstring = inspect.getdoc(function) or ""
    for one in hyperparameters_of(function):
        if kinds[one.name] not in open_ended:
            made = _as_text(one)
            if made is not None:
                found.append(made._replace(help=sentences_about(one.name, docstring)))
            elif one.default is inspect.Parameter.empty:
                raise InputError(
                    f"the hyper-parameter {one.name} of {label} has neither a default nor a type that a text can give: "
                    f"annotate it, {one.name}: float"
                )
    return found


def _as_text(one: Hyperparameter) -> Hyperparameter | None:
    """A hyper-parameter that a text can give; None if it is none."""
    kind, default = one.kind, one.default
    if kind is Any:
        kind = type(default)
        if default is None or kind not in TYPE_NAMES:
            return None
    inner = [arg for arg in typing.get_args(kind) if arg not in (type(None), Ellipsis)]
    origin = typing.get_origin(kind)
    if kind not in TYPE_NAMES and origin is not Literal and not (inner and all(arg in TYPE_NAMES for arg in inner)):
        return None
    if origin not in (None, Literal, tuple, typing.Union, types.UnionType):
        return None
    required = default is inspect.Parameter.empty
    return one._replace(kind=kind | None if required else kind, default=None if required else default)


def sentences_about(name: str, docstring: str) -> str:
    """What a method's docstring says of a hyper-parameter: one or two sentences, else an equation; "" for nothing."""
    prose, equations = list[str](), list[str]()
    for paragraph in docstring.split("\n\n")[1:]:
        text = " ".join(paragraph.split())
        is_equation = all(line.startswith("    ") for line in paragraph.splitlines())
        if is_equation and prose and prose[-1].endswith(":"):
            prose[-1] += f" {text}"
        else:
            (equations if is_equation else prose).append(text)
    mention = re.compile(rf"(?<![\w.]){name}\b")
    sentences = [x for text in prose for x in re.split(r"(?<=\.)(?<!e\.g\.)(?<!i\.e\.)\s+(?=[\w(\[])", text)]
    found = [sentence for sentence in sentences if mention.search(sentence)][:2]
    found = found or [equation for equation in equations if mention.search(equation)][:1]
    text = " ".join(found)
    return text if len(text) <= 320 else f"{text[:317].rpartition(' ')[0]} ..."


def options(method: str, preset: str | None = None) -> list[Hyperparameter]:
    """`hyperparameters`, and `without` for methods that lack a part in some runs (see `algorithms.method`)."""
    without = [Hyperparameter("without", str, "")] if _methods().get(method, {}).get("lacks") else []
    return hyperparameters(method, preset) + without


def known_methods() -> frozenset[str]:
    """The names of all methods."""
    return frozenset([*_methods(), *_added()])


def _added() -> Mapping[str, Callable[..., Any]]:
    """The catalogue, where it has been imported: with what was registered in this process."""
    found: Mapping[str, Callable[..., Any]] = getattr(sys.modules.get("jaxrl_llm.algorithms"), "CATALOGUE", {})
    return found


@cache
def _methods() -> dict[str, Any]:
    """The records of `catalogue.json` by name."""
    found: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return found
