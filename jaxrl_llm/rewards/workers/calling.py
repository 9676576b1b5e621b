"""Call a reward function on a whole batch, or on one sample after another. Imports neither NumPy nor JAX.

Whatever a function returns or raises becomes N numbers, and the entries that come with them. Functions run in threads
or in processes; `limits` decides which calls are made and what is lost when one does not end.
"""

import inspect
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from jaxrl_llm.rewards.entries import concatenate_entries, parsed_result
from jaxrl_llm.utils.errors import error_line

TRAINER_STATE, LOG_METRIC, LOG_EXTRA, ENVIRONMENTS = "trainer_state", "log_metric", "log_extra", "environments"
REPLY_START = "reply_start"  # column: what the prompt already holds of the reply, such as an opened <think>
AT_ONCE = 64  # samples of an async function that is called for each sample


class Logged(NamedTuple):
    """What functions logged by `log_metric` and `log_extra`."""

    metrics: Sequence[tuple[str, float]] = ()  # in their order; a name may occur several times
    extras: Mapping[str, list[Any]] = {}  # N values by name, for the completions


def all_logged(parts: Iterable[tuple[Logged, int]]) -> Logged:
    """What was logged in several calls, one after another; with each the number of its samples."""
    listed = list(parts)
    metrics = [metric for logged, _ in listed for metric in logged.metrics]
    return Logged(metrics, concatenate_entries((logged.extras, count) for logged, count in listed))


class CallInfo(NamedTuple):
    """What a function gets beside its columns, as TRL passes it."""

    names: tuple[str, ...] = ()  # of TRAINER_STATE, LOG_METRIC and LOG_EXTRA
    state: Mapping[str, Any] = {}  # the attributes of `trainer_state`

    def arguments(self, count: int, metrics: list[tuple[str, float]], extras: dict[str, list[Any]]) -> dict[str, Any]:
        """By name, for a call with `count` samples. What the function logs is added to the lists."""

        def log_metric(name: str, value: Any) -> None:
            metrics.append((str(name), float(value)))

        def log_extra(column: str, values: Any) -> None:
            found = [_plain(one) for one in values]
            if len(found) != count:
                raise ValueError(f"log_extra({column!r}) gives {len(found)} values for {count} samples")
            extras[str(column)] = found

        own = {TRAINER_STATE: SimpleNamespace(**self.state), LOG_METRIC: log_metric, LOG_EXTRA: log_extra}
        return {name: own[name] for name in self.names}


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)[:1000]


class CallOutcome(NamedTuple):
    """The result of a function on N samples. None and NaN mean "not scored"; `failed` samples get the default."""

    values: list[float]  # N, NaN where not scored or failed
    failed: list[bool]  # N
    problem: str = ""  # the first error in one line, "" if there was none
    seconds: float = 0.0  # wall-clock time of the call
    entries: Mapping[str, list[Any]] = {}  # further entries that the function returns; see `entries`
    late: Sequence[bool] = ()  # N, samples that exceeded a limit: not scored; empty: none
    logged: Logged = Logged()  # what the function logged


class Lost(NamedTuple):
    """A call that gave no result."""

    problem: str  # in one line
    late: bool = False  # whether it exceeded a limit, of time or memory

    def outcome(self, count: int) -> CallOutcome:
        """The outcome of `count` samples that are lost."""
        nothing, all_of_them = [math.nan] * count, [True] * count
        if self.late:
            return CallOutcome(nothing, [False] * count, self.problem, late=all_of_them)
        return CallOutcome(nothing, all_of_them, self.problem)


F = TypeVar("F", bound=Callable[..., Any])


def per_sample(function: F) -> F:
    """Declare that a function looks at one completion at a time and may take long with some of them; see `limits`."""
    function.per_sample = True  # type: ignore[attr-defined]
    return function


def time_limit_text(seconds: float) -> str:
    """The problem of a call that exceeds its time limit."""
    return f"TimeoutError: no result within its time limit of {seconds:g} s"


class CallMode(NamedTuple):
    """Which calls are made: one with all samples, or one for each."""

    seconds: float  # limit of a call
    each: bool = False
    at_once: bool = False  # for each: call an async function for up to `AT_ONCE` samples at the same time


def calls(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], count: int, given: CallInfo, how: CallMode
) -> Iterator[CallOutcome | Lost]:
    """Call the function; the results in order. One that comes after its `seconds` is lost. Never raises."""
    if not how.each:
        yield _call(function, arguments, count, how.seconds, given)
        return
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    step = AT_ONCE if how.at_once and is_async else 1
    for first in range(0, count, step):
        several = range(first, min(first + step, count))
        ones = [{name: column[i : i + 1] for name, column in arguments.items()} for i in several]
        if step == 1:
            yield _call(function, ones[0], 1, how.seconds, given)
            continue
        import asyncio

        async def all_of(ones: list[dict[str, list[Any]]] = ones) -> list[CallOutcome | Lost]:
            return await asyncio.gather(*(_call_async(function, one, how.seconds, given) for one in ones))

        try:
            found = asyncio.run(all_of())
        except BaseException:  # sys.exit() in one ends all
            found = [_call(function, one, 1, how.seconds, given) for one in ones]
        yield from found


def _call(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], count: int, seconds: float, given: CallInfo
) -> CallOutcome | Lost:
    metrics: list[tuple[str, float]] = []
    extras: dict[str, list[Any]] = {}
    start = time.monotonic()
    try:
        more = given.arguments(count, metrics, extras)
        found = _outcome(_awaited(function(**arguments, **more), seconds), count)._replace(
            logged=Logged(metrics, extras)
        )
    except BaseException as error:  # even sys.exit() in a reward only makes the reward fail
        late = isinstance(error, TimeoutError) and time.monotonic() - start >= seconds
        return Lost(time_limit_text(seconds) if late else error_line(error), late)
    taken = time.monotonic() - start
    return found._replace(seconds=taken) if taken <= seconds else Lost(time_limit_text(seconds), late=True)


async def _call_async(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], seconds: float, given: CallInfo
) -> Any:
    import asyncio

    metrics: list[tuple[str, float]] = []
    extras: dict[str, list[Any]] = {}
    start = time.monotonic()
    try:
        more = given.arguments(1, metrics, extras)
        limit = None if math.isinf(seconds) else seconds
        found = _outcome(await asyncio.wait_for(function(**arguments, **more), limit), 1)
        return found._replace(seconds=time.monotonic() - start, logged=Logged(metrics, extras))
    except (Exception, asyncio.CancelledError) as error:
        late = isinstance(error, TimeoutError) and time.monotonic() - start >= seconds
        return Lost(time_limit_text(seconds) if late else error_line(error), late)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
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

    async def within_limit() -> Any:
        return await asyncio.wait_for(result, None if math.isinf(seconds) else seconds)

    return asyncio.run(within_limit())


def _outcome(result: Any, count: int) -> CallOutcome:
    values, failed, entries, problem = parsed_result(result, count)
    return CallOutcome(values, failed, problem, entries=entries)


def reads_environments(function: Callable[..., Any]) -> bool:
    """Whether a function names `environments`, or takes **kwargs and has that word as a text, to look it up there."""
    taken = parameters_of(function)
    code = getattr(inspect.unwrap(function), "__code__", None)
    looks_up = code is not None and ENVIRONMENTS in code.co_consts
    return any(one.name == ENVIRONMENTS or (one.kind is one.VAR_KEYWORD and looks_up) for one in taken)


def wants_texts(function: Callable[..., Any]) -> bool:
    """Whether a function declares that its completions are texts: `completions: list[str]`, or another of texts."""
    found = [one.annotation for one in parameters_of(function) if one.name == "completions"]
    text = "" if not found or found[0] is inspect.Parameter.empty else str(found[0])
    return re.search(r"\[\s*str\s*\]['\"]?$", text) is not None
