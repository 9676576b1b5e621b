"""Checks of whole numbers."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from jaxrl_llm.utils.errors import InputError, shown


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int. InputError unless it is a whole number (True and 2.0 are not) from `least` to `most`.

    >>> whole_number("limit", 3, 1)
    3
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}, but must be a whole number")
    number = int(value)
    if number < least or (most is not None and number > most):
        upper = "" if most is None else f" and at most {most}"
        raise InputError(f"{name} must be at least {least}{upper}, found {shown(number)}")
    return number
