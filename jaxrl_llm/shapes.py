"""Checks of arrays where they enter the library, by chex: rank, shape and kind of dtype, told in one line.

Only shapes and dtypes are looked at, so that traced values pass too, and a compiled program has no operation more.
`chex.disable_asserts()` turns the checks off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax.numpy as jnp

from jaxrl_llm.errors import InputError

BOOL, INTEGERS, FLOATS, NUMBERS = "bool", "integers", "floating point", "numbers"
_DTYPES: dict[str, Any] = {BOOL: jnp.bool_, INTEGERS: jnp.integer, FLOATS: jnp.floating}
Axis = int | str  # a size, or the name of an axis of any size


def check_array(name: str, value: Any, kind: str, shape: Sequence[Axis], because: str = "") -> None:
    """InputError unless a value is an array of a kind of numbers and of a shape.

    kind: BOOL, INTEGERS, FLOATS, or NUMBERS for all of these. because: where the shape comes from, for the message.

    >>> check_array("tokens", jnp.zeros(3), INTEGERS, ("rows", "positions"))
    Traceback (most recent call last):
    jaxrl_llm.errors.InputError: tokens has the shape [3], but must be [rows, positions]
    """
    wanted = f"[{', '.join(map(str, shape))}]"
    if not is_array(value):
        raise InputError(f"{name} is {in_words(value)}, but must be an array, {kind} {wanted}")
    if not has_shape(value, shape):
        raise InputError(f"{name} has the shape {list(value.shape)}, but must be {wanted}{because}")
    if not is_of(value, kind):
        raise InputError(f"{name} has the dtype {value.dtype}, but must be {kind}")


def is_array(value: Any) -> bool:
    """Whether it is an array of JAX or NumPy, traced or not, or a jax.ShapeDtypeStruct."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def has_shape(value: Any, shape: Sequence[Axis]) -> bool:
    """Whether an array is of a shape, in which a name is any size."""
    try:
        chex.assert_shape(value, tuple(None if isinstance(axis, str) else axis for axis in shape))
    except AssertionError:
        return False
    return True


def is_of(value: Any, kind: str) -> bool:
    """Whether an array's dtype is of a kind."""
    if kind == NUMBERS:
        return bool(jnp.issubdtype(value.dtype, jnp.number)) or value.dtype == bool
    try:
        chex.assert_type(value, _DTYPES[kind])
    except AssertionError:
        return False
    return True


def in_words(value: Any) -> str:
    """A value in few words: an array by dtype and shape, anything else by its type."""
    if is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else f"of the type {type(value).__name__}"
