"""Call one reward function on a batch and turn whatever it returns or raises into N numbers.

This runs in a reward's process, so it imports little (and not NumPy).
"""

from __future__ import annotations

import inspect
import math
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from numbers import Real
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """The result of one function on N samples. None and NaN mean "not scored"; `failed` samples get the default."""

    values: list[float]  # N, NaN where not scored or failed
    failed: list[bool]  # N
    problem: str  # the first error in one line, "" if there was none
    seconds: float  # wall-clock time of the call


def call_reward(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], count: int, deadline: float, limit: float
) -> Outcome:
    """Call the function on the batch and, if it raises, on each sample separately. Never raises.

    arguments: name -> `count` values. deadline: on the clock of time.monotonic(); later results are discarded. limit:
    the time limit in seconds, for the message.
    """
    start = time.monotonic()
    try:
        values, failed, problem = _numbers(_call(function, arguments, deadline), count)
        if time.monotonic() > deadline:
            return all_failed(count, time_limit_text(limit), time.monotonic() - start)
        return Outcome(values, failed, problem, time.monotonic() - start)
    except BaseException as error:  # even sys.exit() in a reward only makes the reward fail
        problem = error_line(error)

    values, failed = _lost(count)
    for sample in range(count):
        if time.monotonic() >= deadline:
            return all_failed(count, time_limit_text(limit), time.monotonic() - start)
        try:
            one = {name: column[sample : sample + 1] for name, column in arguments.items()}
            value, lost, why = _numbers(_call(function, one, deadline), 1)
            values[sample], failed[sample] = value[0], lost[0]
            problem = problem or why
        except BaseException:  # counts as failed; only the exception of the whole batch is logged
            continue
    return Outcome(values, failed, problem, time.monotonic() - start)


def all_failed(count: int, problem: str, seconds: float) -> Outcome:
    """The outcome of a function that failed on all samples."""
    return Outcome(*_lost(count), problem, seconds)


def time_limit_text(limit: float) -> str:
    """The problem of a function that exceeds its time limit."""
    return f"TimeoutError: no result within its time limit of {limit:g} s"


def error_line(error: BaseException) -> str:
    """The exception in one line of at most 300 characters, since its message may contain a whole completion."""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # __str__ of a user's exception can raise
        text = type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's parameters; **columns if Python has no signature, as for some built-in functions."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _call(function: Callable[..., Any], arguments: Mapping[str, list[Any]], deadline: float) -> Any:
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result
    import asyncio  # here, because it takes a third of the start-up time of a reward's process

    async def within_limit(awaitable: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(awaitable, max(0.0, deadline - time.monotonic()))

    return asyncio.run(within_limit(result))


def _numbers(result: Any, count: int) -> tuple[list[float], list[bool], str]:
    """A function's result as (N values, N flags for failed, first problem)."""
    if isinstance(result, str | bytes | Mapping | AbstractSet) or not isinstance(result, Iterable):
        return *_lost(count), f"TypeError: returned {type(result).__name__}, not a list of {count} numbers"
    entries = list(islice(result, count + 1))  # a generator may be infinite
    if len(entries) != count:
        found = len(entries) if len(entries) < count else f"more than {count}"
        return *_lost(count), f"ValueError: returned {found} values for {count} samples"
    values, failed = _lost(count)
    problem = ""
    for sample, entry in enumerate(entries):
        try:
            values[sample] = _number(entry)
            failed[sample] = False
        except Exception as error:
            problem = problem or error_line(error)
    return values, failed, problem


def _number(entry: Any) -> float:
    if entry is None:
        return math.nan
    is_scalar_array = getattr(entry, "shape", None) == () and not isinstance(entry, str | bytes)
    if not (isinstance(entry, Real) or is_scalar_array):
        raise TypeError(f"returned {type(entry).__name__}, not a number")
    value = float(entry)
    try:
        struct.pack("<f", value)  # raises OverflowError if the value rounds to infinity
        finite = not math.isinf(value)
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"returned {entry!r}, which is infinite in float32")
    return value


def _lost(count: int) -> tuple[list[float], list[bool]]:
    return [math.nan] * count, [True] * count
