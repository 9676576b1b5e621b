"""Kinds of values: what an argument, or a setting in a model's files, may be, checked before anything uses it."""

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.utils import errors
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.json import read_object

# What is not an error of the library that raised it.
FATAL = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)


class Kind(NamedTuple):
    """What a value may be: in words, for "... must be {words}", and as a test."""

    words: str
    test: Callable[[Any], bool]


def whole(least: int, most: int = 2**31 - 1) -> Kind:
    """A whole number (no bool, no float) from `least` to `most`, both included."""

    def test(x: Any) -> bool:
        return isinstance(x, Integral) and not isinstance(x, bool) and least <= x <= most  # type: ignore[operator]

    return Kind(f"a whole number from {least} to {most}", test)


def number(least: float = -math.inf, above: float = -math.inf) -> Kind:
    """A finite int or float, at least `least` and above `above`."""
    limits = [f"at least {least:g}"] * (least > -math.inf) + [f"above {above:g}"] * (above > -math.inf)

    def test(x: Any) -> bool:
        is_real = isinstance(x, Real) and not isinstance(x, bool)
        # A float32 must be able to hold it: what is computed from settings is.
        return is_real and -3e38 <= x <= 3e38 and float(x) >= least and float(x) > above

    return Kind(" ".join(["a finite number", *limits]), test)


def one_of(*names: str) -> Kind:
    """One of some texts."""
    return Kind("one of " + ", ".join(names), lambda x: isinstance(x, str) and x in names)


def list_of(kind: Kind) -> Kind:
    """A list whose items are all of one kind."""
    words = kind.words.removeprefix("a ")
    return Kind(f"a list, each {words}", lambda x: isinstance(x, list) and all(map(kind.test, x)))


def either(*kinds: Kind) -> Kind:
    """Of one of these kinds."""
    return Kind(", or ".join(kind.words for kind in kinds), lambda x: any(kind.test(x) for kind in kinds))


def or_null(kind: Kind) -> Kind:
    """Of a kind, or null."""
    return either(kind, Kind("null", lambda x: x is None))


FLAG = Kind("true or false", lambda x: isinstance(x, bool))
TEXT = Kind("a text", lambda x: isinstance(x, str))
SECTION = Kind("an object of settings", lambda x: isinstance(x, dict))


def given(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """A setting, or the default where the file leaves it out or has null."""
    value = raw.get(name)
    return default if value is None else value


def check(raw: Mapping[str, Any], kinds: Mapping[str, Kind], where: str, prefix: str = "") -> None:
    """InputError for the first setting in `raw` that is not of its kind; what has no kind is not looked at.

    where: the file, for the message; prefix: of the section, with its dot.
    """
    for name, kind in kinds.items():
        if name in raw and not kind.test(raw[name]):
            raise InputError(f"{where}: {prefix}{name} is {shown(raw[name])}, but must be {kind.words}")


def require_kind(name: str, value: Any, kind: Kind) -> None:
    """InputError unless an argument is of a kind."""
    if not kind.test(value):
        raise InputError(f"{name} is {shown(value)}, but must be {kind.words}")


def shown(value: Any) -> str:
    """A value as a short text of one line, whatever it is."""
    try:
        return errors.shown(value, most=60)
    except (ValueError, RecursionError):  # a list of numbers with too many digits; too deep
        return f"a {type(value).__name__}"


def reason(error: BaseException) -> str:
    """Why something failed, in one short line, whatever was raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError | AttributeError | TypeError) else text[:300]


def json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; InputError where it cannot be read, or holds something else."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None


def path_of(value: Any, name: str) -> Path:
    """A path that was given as a text or a path, `~` expanded; InputError for anything else and for an empty text."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(f"{name} is {shown(value)}, but must be a path")
    with contextlib.suppress(RuntimeError):  # no such user
        return Path(text).expanduser()
    return Path(text)
