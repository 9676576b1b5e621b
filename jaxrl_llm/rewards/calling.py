"""Call a reward function on a whole batch, or on one sample after another. Imports neither NumPy nor JAX.

Whatever a function returns or raises becomes N numbers, and the entries that come with them. Functions run in threads
or in processes; `limits` decides which calls are made and what is lost when one does not end.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxrl_llm.errors import error_line
from jaxrl_llm.rewards.entries import parsed

AT_ONCE = 64  # samples of an async function that is called for each sample


class Outcome(NamedTuple):
    """The result of a function on N samples. None and NaN mean "not scored"; `failed` samples get the default."""

    values: list[float]  # N, NaN where not scored or failed
    failed: list[bool]  # N
    problem: str = ""  # the first error in one line, "" if there was none
    seconds: float = 0.0  # wall-clock time of the call
    entries: Mapping[str, list[Any]] = {}  # further entries that the function returns; see `entries`
    late: Sequence[bool] = ()  # N, samples that exceeded a limit: not scored; empty: none


class Lost(NamedTuple):
    """A call that gave no result."""

    problem: str  # in one line
    late: bool = False  # whether it exceeded a limit, of time or memory

    def outcome(self, count: int) -> Outcome:
        """The outcome of `count` samples that are lost."""
        nothing, all_of_them = [math.nan] * count, [True] * count
        if self.late:
            return Outcome(nothing, [False] * count, self.problem, late=all_of_them)
        return Outcome(nothing, all_of_them, self.problem)


F = TypeVar("F", bound=Callable[..., Any])


def per_sample(function: F) -> F:
    """Declare that a function looks at one completion at a time and may take long with some of them; see `limits`."""
    function.per_sample = True  # type: ignore[attr-defined]
    return function


def time_limit_text(seconds: float) -> str:
    """The problem of a call that exceeds its time limit."""
    return f"TimeoutError: no result within its time limit of {seconds:g} s"


def call_whole(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], count: int, seconds: float
) -> Outcome | Lost:
    """Call the function once for all samples. A result that comes after `seconds` is lost. Never raises."""
    start = time.monotonic()
    try:
        found = _outcome(_awaited(function(**arguments), seconds), count)
    except BaseException as error:  # even sys.exit() in a reward only makes the reward fail
        late = isinstance(error, TimeoutError) and time.monotonic() - start >= seconds
        return Lost(time_limit_text(seconds) if late else error_line(error), late)
    taken = time.monotonic() - start
    return found._replace(seconds=taken) if taken <= seconds else Lost(time_limit_text(seconds), late=True)


def call_each(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], count: int, seconds: float, at_once: bool
) -> Iterator[Outcome | Lost]:
    """Call the function for each sample, within `seconds` each; the results in order. Never raises.

    at_once: call an async function for up to `AT_ONCE` samples at the same time.
    """
    step = AT_ONCE if at_once and is_async(function) else 1
    for first in range(0, count, step):
        several = range(first, min(first + step, count))
        ones = [{name: column[i : i + 1] for name, column in arguments.items()} for i in several]
        if step == 1:
            yield call_whole(function, ones[0], 1, seconds)
            continue
        import asyncio

        async def all_of(ones: list[dict[str, list[Any]]] = ones) -> list[Outcome | Lost]:
            return await asyncio.gather(*(_call_async(function, one, seconds) for one in ones))

        try:
            found = asyncio.run(all_of())
        except BaseException:  # sys.exit() in one ends all
            found = [call_whole(function, one, 1, seconds) for one in ones]
        yield from found


async def _call_async(function: Callable[..., Any], arguments: Mapping[str, list[Any]], seconds: float) -> Any:
    import asyncio

    start = time.monotonic()
    try:
        limit = None if math.isinf(seconds) else seconds
        found = _outcome(await asyncio.wait_for(function(**arguments), limit), 1)
        return found._replace(seconds=time.monotonic() - start)
    except (Exception, asyncio.CancelledError) as error:
        late = isinstance(error, TimeoutError) and time.monotonic() - start >= seconds
        return Lost(time_limit_text(seconds) if late else error_line(error), late)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object that is called, is `async`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's parameters; **columns if Python has no signature, as for some built-in functions."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _awaited(result: Any, seconds: float) -> Any:
    """What a function returned, or what an async one returns within `seconds`."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # here, because it takes a third of the start-up time of a reward's process

    async def within_limit(awaitable: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(awaitable, None if math.isinf(seconds) else seconds)

    return asyncio.run(within_limit(result))


def _outcome(result: Any, count: int) -> Outcome:
    values, failed, entries, problem = parsed(result, count)
    return Outcome(values, failed, problem, entries=entries)
