"""Shapes of arrays: checked where arrays enter the library, and in buckets, so that few programs are compiled.

Checks are made by chex, of rank, shape and kind of dtype, and told in one line. Only shapes and dtypes are looked at,
so that traced values pass too, and a compiled program has no operation more. `chex.disable_asserts()` turns the checks
off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.utils.errors import InputError

BOOL, INTEGERS, FLOATS, NUMBERS = "bool", "integers", "floating point", "numbers"
_DTYPES: dict[str, Any] = {BOOL: jnp.bool_, INTEGERS: jnp.integer, FLOATS: jnp.floating}
Axis = int | str  # a size, or the name of an axis of any size


def check_array(name: str, value: Any, kind: str, shape: Sequence[Axis], because: str = "") -> None:
    """InputError unless a value is an array of a kind of numbers and of a shape.

    kind: BOOL, INTEGERS, FLOATS, or NUMBERS for all of these. because: where the shape comes from, for the message.

    >>> check_array("tokens", jnp.zeros(3), INTEGERS, ("rows", "positions"))
    Traceback (most recent call last):
    jaxrl_llm.utils.errors.InputError: tokens has the shape [3], but must be [rows, positions]
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


def bucket(length: int, least: int = 8, per_octave: int = 4) -> int:
    """The smallest bucket that holds `length`.

    There are `per_octave` buckets from each power of two to the next, starting at `least`; with 4, above `least`, at
    most a fifth of a bucket is padding.

    >>> [bucket(n) for n in (1, 9, 17, 33, 65, 1000)]
    [8, 10, 20, 40, 80, 1024]
    >>> [bucket(n, per_octave=2) for n in (9, 13, 17, 33)]
    [12, 16, 24, 48]
    """
    size = least
    while size < length:
        octave = 1 << (size.bit_length() - 1)
        size += max(octave // per_octave, 1)
    return size


def pad_rows(rows: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[N, length] right-padded with zeros, and bool[N, length] true on what is not padding."""
    tokens, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return tokens, mask
