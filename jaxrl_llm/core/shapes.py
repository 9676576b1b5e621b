"""Shapes of arrays and batches: checked where they enter the library, and in buckets, for few compiled programs.

Checks are made by chex, of rank, shape and kind of dtype, and told in one line. Only shapes and dtypes are looked at,
so that traced values pass too, and a compiled program has no operation more. `chex.disable_asserts()` turns the checks
off.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.trajectory import REQUIRED, SHARED, PolicyOutputs, Trajectories
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


_KINDS = {"b": BOOL, "i": INTEGERS, "f": FLOATS, "n": NUMBERS}  # by the letter in _FORMS; rewards may be integers
_FORMS = {  # the kind and the axes of each array: N rows, L positions, other axes of any length
    **dict.fromkeys(("tokens", "policy_step", "turn"), "i NL"),
    **dict.fromkeys(("token_mask", "action_mask"), "b NL"),
    **dict.fromkeys(
        ("behaviour_logp", "support_floor", "untruncated_logp", "old_logp", "reference_logp", "previous_logp"), "f NL"
    ),
    **dict.fromkeys(("entropy", "advantages", "returns"), "f NL"),
    **dict.fromkeys(("token_rewards", "weights"), "n NL"),
    **dict.fromkeys(("group", "prompt_id"), "i N"),
    "truncated": "b N",
    "temperature": "f N",
    "reward": "n N",
    "turn_rewards": "n NK",
    "state_key": "i NK",
    "experts": "i NLDK",
    "thoughts": "f NLRK",
}


def check_batch(batch: Any) -> None:
    """InputError, naming the field, if shapes or dtypes of a batch do not match its tokens [N, L].

    The check is static: it works on tracers and adds nothing to a compiled program. It is called at public boundaries
    (transforms, objectives, `compare`, the update), not by each function inside.
    """
    if not isinstance(batch, Trajectories):
        raise InputError(f"the batch is {in_words(batch)}, but must be Trajectories, such as `sample` gives")
    shape = getattr(batch.tokens, "shape", None)
    if shape is None or len(shape) != 2:
        raise InputError(f"batch.tokens is {in_words(batch.tokens)}, but must be integers [rows, positions]")
    for field, form in _FORMS.items():
        if (value := getattr(batch, field)) is not None:
            _check_array(f"batch.{field}", value, form, shape)
        elif field in REQUIRED:
            raise InputError(f"batch.{field} is None, but every batch has one: {_KINDS[form[0]]} {_axes(form, shape)}")
    if batch.values is not None:
        heads = "f NLH" if getattr(batch.values, "ndim", 2) == 3 else "f NL"
        _check_array("batch.values", batch.values, heads, shape)
    for field, form in {"rewards": "n N", "info": "", **dict.fromkeys(SHARED, "")}.items():
        entries = getattr(batch, field)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            raise InputError(f"batch.{field} is {in_words(entries)}, but must be a dict of arrays by name")
        for name, value in entries.items():
            if form:
                _check_array(f"batch.{field}[{name!r}]", value, form, shape)
            elif field == "info" and getattr(value, "shape", ())[:1] != shape[:1]:
                raise InputError(
                    f"batch.info[{name!r}] is {in_words(value)}, but needs a first axis of {shape[0]} rows"
                )


def _check_array(name: str, value: Any, form: str, shape: tuple[int, ...]) -> None:
    """InputError unless the value is an array of the given form, where `shape` is (N, L)."""
    check_array(name, value, _KINDS[form[0]], _axes(form, shape), f", since tokens are {list(shape)}")


def _axes(form: str, shape: tuple[int, ...]) -> list[int | str]:
    return [shape["NL".index(axis)] if axis in "NL" else axis for axis in form[2:]]


def check_outputs(outputs: Any, batch: Any) -> None:
    """InputError if an objective's arguments are swapped, or the outputs' shapes do not match the batch; static."""
    if isinstance(outputs, Trajectories) and isinstance(batch, PolicyOutputs):
        raise InputError("an objective was called with (batch, outputs), but takes (outputs, batch): swap them")
    expect("the outputs of an objective", outputs, PolicyOutputs)
    check_batch(batch)
    for name in ("logp", "entropy"):
        check_array(f"outputs.{name}", getattr(outputs, name), FLOATS, batch.tokens.shape, ", as the tokens are")
