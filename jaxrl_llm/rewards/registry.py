"""Rewards by name, for command lines and configuration files."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.rewards import verifiers
from jaxrl_llm.rewards.runner import Reward

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exact_match": verifiers.exact_match,
    "number_match": verifiers.number_match,
    "math_verify": verifiers.math_verify,
    "reasoning_gym": verifiers.reasoning_gym,
}
_FACTORIES: dict[str, Callable[[str], Callable[..., Any]]] = {"format_match": verifiers.format_match}


def names() -> list[str]:
    """The names of the built-in rewards, sorted."""
    return sorted([*_FUNCTIONS, *_FACTORIES])


def get_reward(spec: str) -> Reward:
    """The reward that a text of the form `NAME[*WEIGHT]` describes; the weight is 1 if not given.

    NAME is one of `names()`, `format_match(REGEX)`, `path/to/file.py:FUNCTION` or `package.module:FUNCTION`.
    The file or module is run: its code must be trusted.

    >>> get_reward("number_match*0.5").weight
    0.5

    Raises InputError for an unknown name, a file, module or function that is missing or fails, and a bad weight.
    """
    spec = spec.strip()
    name, weight = spec, 1.0
    if "*" in spec and not spec.endswith(")"):  # a regular expression may hold a star itself
        name, _, factor = spec.rpartition("*")
        name, weight = name.strip(), _weight(spec, factor)
    head, bracket, rest = name.partition("(")
    if bracket and head in _FACTORIES:
        if not rest.endswith(")"):
            raise InputError(f"reward {spec!r}: the bracket after {head!r} is never closed")
        return Reward(_FACTORIES[head](rest[:-1]), weight)
    if name in _FACTORIES:
        raise InputError(f"reward {name!r} needs a pattern: {name}(REGEX)")
    if ":" in name:
        source, _, function = name.rpartition(":")
        return Reward(_function(_load(source), function), weight)
    if name.endswith(".py"):
        raise InputError(f"reward {name!r} names no function: write {name}:FUNCTION")
    if name not in _FUNCTIONS:
        raise unknown("reward", name, names())
    return Reward(_FUNCTIONS[name], weight)


def _weight(spec: str, factor: str) -> float:
    try:
        weight = float(factor)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise InputError(f"reward {spec!r}: {factor!r} is not a weight; write NAME*WEIGHT, such as number_match*0.5")
    return weight


def _load(source: str) -> ModuleType:
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source).expanduser()
        if not path.is_file():
            raise InputError(f"no reward file {source!r}: give the path of a Python file")
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None  # it never is for a name in .py
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"cannot load rewards from {source!r}: {type(error).__name__}: {error}") from error


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise unknown(f"function in {module.__name__!r}", name, own)
