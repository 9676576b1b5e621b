"""Checks of the values that parts are composed of, made where they are composed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.utils.errors import InputError, is_off, shown


def names_of(needs: Iterable[str]) -> frozenset[str]:
    """The names as a set; InputError for a single string, which would be split into letters, and for no names."""
    if isinstance(needs, str):
        raise InputError(f"needs is {needs!r}, but must be a set of names: {{{needs!r}}}")
    found = tuple(needs) if isinstance(needs, Iterable) else None
    if found is None or not all(isinstance(need, str) for need in found):
        raise InputError(f"needs is {shown(needs)}, but must be a set of names, such as {{'old_logp'}}")
    return frozenset(found)


def require_function(name: str, value: Any, alone: bool = False) -> None:
    """InputError unless the value is a function of a batch, not a factory of transforms or objectives.

    alone: and of nothing else that it requires.
    """
    if not callable(value):
        raise InputError(f"{name} is {shown(value)}, but must be a function of a batch")
    made = getattr(value, "__annotations__", {}).get("return")
    if alone and (required := _required_of(value)) > 1:
        raise InputError(f"{name} is a function of {required} values, but must be a function of a batch alone")
    if made in ("Transform", "Objective"):
        raise InputError(
            f"{name} is {value.__name__}, which makes a value of the type {made}: give a function of a batch"
        )


def _required_of(function: Any) -> int:
    """How many positional arguments a function requires; 0 where it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in places and one.default is one.empty for one in parameters)


def expect(name: str, value: Any, kind: type) -> None:
    """InputError unless the value is an instance of `kind`; if a function returns one, the error says to call it."""
    if isinstance(value, kind):
        return
    found, hint = in_words(value), ""
    if isinstance(value, type) and issubclass(value, kind):
        found, hint = f"the class {value.__name__}", f": call it, {value.__name__}()"
    elif callable(value) and getattr(value, "__annotations__", {}).get("return") in (kind, kind.__name__):
        found, hint = "the function " + value.__name__, f", which makes one: call it, {value.__name__}(...)"
    elif getattr(value, "makes_parts", False):
        found, hint = "the function " + value.__name__, f", which makes a part: call it, {value.__name__}(...)"
    raise InputError(f"{name} must be of the type {kind.__name__}, but is {found}{hint}")


def check_divisor(of: str, divisor: Any) -> None:
    """InputError unless something can be divided by it: a number other than 0."""
    check_number(f"what {of} is divided by", divisor)
    if is_off(divisor):
        raise InputError(f"{of} is divided by 0")
