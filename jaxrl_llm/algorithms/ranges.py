"""Checks of hyper-parameters: their types, and the ranges that their names have in every method."""

from __future__ import annotations

import ast
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.core import choices
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.parameter_ranges import RANGES
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.keywords import unknown_keyword

TYPE_NAMES = {"bool": "true or false", "str": "text", "int": "a whole number", "float": "a number"}


def annotation(parameter: inspect.Parameter) -> str:
    """The annotation of a parameter as it is written, such as "float | None"; "" without one.

    The same with and without `from __future__ import annotations` in its module.
    """
    kind = parameter.annotation
    if kind is parameter.empty:
        return ""
    return kind if isinstance(kind, str) else _written(kind)


def _written(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(_written, typing.get_args(kind)))
    return "None" if kind is type(None) else inspect.formatannotation(kind)


def names_of(kind: str) -> tuple[str, ...]:
    """The names that an annotation lists; empty for one that is no choice."""
    if kind.startswith("Literal["):
        return tuple(ast.literal_eval(f"({kind.removeprefix('Literal[').partition(']')[0]},)"))
    return typing.get_args(getattr(choices, kind)) if is_choice(kind) else ()


def is_choice(kind: str) -> bool:
    """Whether an annotation lists names: a Literal, or one of `jaxrl_llm.core.choices`."""
    return kind.startswith("Literal[") or typing.get_origin(getattr(choices, kind, None)) is typing.Literal


def check(
    method: str, name: str, value: Any, kind: str = "float", ranges: Mapping[str, Mapping[str, Any]] = RANGES
) -> None:
    """InputError, naming method and hyper-parameter, for a value of the wrong type, not finite, or out of range.

    kind: the annotation of the parameter, such as "float | None". ranges: limits by the hyper-parameter's name. Scalar
    arrays pass, including traced ones.
    """
    label, (kind, _, rest) = f"{method}: {name}", kind.partition(" | ")
    kind = "str" if is_choice(kind) else kind
    if (value is None and rest == "None") or kind not in TYPE_NAMES:
        return
    if kind in ("bool", "str"):
        if not isinstance(value, bool if kind == "bool" else str):
            raise InputError(f"{label} is {shown(value)}, but must be {TYPE_NAMES[kind]}")
        return
    if getattr(value, "shape", ()) != ():
        raise InputError(f"{label} is an array of the shape {list(value.shape)}, but must be {TYPE_NAMES[kind]}")
    check_number(label, value, whole=kind == "int", **ranges.get(name, {}))


def checked(build: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Wrap the function that builds a method with a check of its hyper-parameters' names, types and ranges."""
    parameters = inspect.signature(build).parameters

    @functools.wraps(build)
    def method(*args: Any, **hyperparameters: Any) -> Algorithm:
        if len(args) > len(parameters):
            raise InputError(f"{build.__name__} has {len(parameters)} hyper-parameters, but was given {len(args)}")
        given = {**dict(zip(parameters, args, strict=False)), **hyperparameters}
        for name, value in given.items():
            if name not in parameters:
                raise unknown_keyword(name, parameters, f"hyper-parameter of {build.__name__}")
            check(build.__name__, name, value, annotation(parameters[name]))
        return build(**given)

    return method
