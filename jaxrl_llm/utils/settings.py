"""Runtime type checks of settings in frozen dataclasses, whose values may come from files or untyped scripts.

`as_arguments` writes settings as the options of a command.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Container, Mapping
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxrl_llm.utils.errors import InputError, gather, require, shown, unknown

_WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", NoneType: "nothing"}


def check_types(settings: Any, prefix: str = "") -> None:
    """Check every field of a frozen dataclass against its annotation, and convert it to that type.

    Lists become tuples, paths become strings, and NumPy scalars become Python's. A dict may
    stand for a dataclass. Supported annotations are int, float (finite), str, bool, Literal, tuple[T, ...],
    dict[str, T], dataclasses, T | None and Any.
    Raises InputError, naming the field with `prefix` in front, for a value of another type.
    """
    if wrong := coerce_fields(settings, prefix):
        gather(*(partial(raise_error, error) for error in wrong.values()))


def coerce_fields(settings: Any, prefix: str = "") -> dict[str, InputError]:
    """Like `check_types`, but returns the errors by field name instead of raising them."""
    hints, wrong = get_type_hints(type(settings)), dict[str, InputError]()
    for field in dataclasses.fields(settings):
        try:
            value = _coerce(getattr(settings, field.name), hints[field.name], prefix + field.name)
            object.__setattr__(settings, field.name, value)
        except InputError as error:
            wrong[field.name] = error
    return wrong


def range_checks(
    settings: Any, prefix: str = "", dashes: bool = False, without: Container[str] = ()
) -> list[Callable[[], None]]:
    """Checks, for `errors.gather`, that fields are within the ranges (`core.arguments.ranges`) of their annotations.

    dashes: fields are called as the options of a command. without: fields that are not checked.
    """
    return [
        partial(require, prefix + (name.replace("_", "-") if dashes else name), getattr(settings, name), **fact.limits)
        for name, hint in get_type_hints(type(settings), include_extras=True).items()
        for fact in getattr(hint, "__metadata__", ())
        if hasattr(fact, "limits") and name not in without
    ]


def raise_error(error: InputError) -> None:
    """Raise the error; a check for `errors.gather`."""
    raise error


def _coerce(value: Any, kind: Any, name: str) -> Any:
    """The value converted to `kind`; InputError if it is of another type."""
    origin, inner = get_origin(kind), get_args(kind)
    numpy = sys.modules.get("numpy")  # without it there is no value of it, and a command's mistake is told sooner
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if kind is Any or kind is object:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (kind,) = (one for one in inner if one is not NoneType)
        return _coerce(value, kind, name)
    if origin is Literal:
        if not isinstance(value, str):
            raise _wrong(name, value, f"one of {', '.join(map(str, inner))}")
        if value not in inner:
            raise unknown(name.removeprefix("an "), value, inner)
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(name, value, f"a list, each entry {_WORDS.get(inner[0], 'a value')}")
        return tuple(_coerce(entry, inner[0], f"an entry of {name}") for entry in value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(name, value, "settings by name")
        return {key: _coerce(entry, inner[1], f"{name}.{key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(kind):
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return kind(**value)  # type: ignore[operator]
        if not isinstance(value, kind):  # type: ignore[arg-type]
            raise _wrong(name, value, f"settings by name, {kind.__name__}(...)")  # type: ignore[union-attr]
        return value
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(name, value, _WORDS[kind])
    if kind is float and not abs(value) <= sys.float_info.max:
        raise _wrong(name, value, _WORDS[kind])
    if isinstance(value, str) and any(0xD800 <= ord(character) <= 0xDFFF for character in value):
        raise _wrong(name, value, "text that UTF-8 can hold")
    return value


def _wrong(name: str, value: Any, wanted: str) -> InputError:
    plain = value is None or isinstance(value, int | float)
    found = shown(value, 60) if plain else f"{type(value).__name__} {shown(value, 60)}"
    return InputError(f"{name} is {found}, but must be {wanted}")


def as_arguments(values: dict[str, Any], prefix: str = "--") -> list[str]:
    """Settings of a run, as a configuration file has them, as command-line arguments: both get the same checks."""
    out: list[str] = []
    for name, value in values.items():
        name = ("algorithm" if name == "hyperparameters" else name).replace("_", "-")
        flag = prefix + name
        if isinstance(value, dict) and name == "task-options":
            out += [flag, *(str(x) for pair in value.items() for x in pair)]
        elif isinstance(value, dict):
            out += as_arguments(value, flag + ".")
        elif isinstance(value, bool):
            out.append(flag if value else f"{prefix}no-{name}")
        elif isinstance(value, list):
            out += [flag, *map(str, value)]
        elif value is not None:
            out.append(f"{flag}={value}")  # "=" allows values that begin with a dash
    return out
