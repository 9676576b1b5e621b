"""Run reward functions side by side, each within its time limit, and combine their scores.

A reward is a plain Python function with the signature that TRL's trainers use,

    def reward(completions, **columns) -> list[float]          # or async def

called by keyword with lists of length N: `completions` and every column of the batch. It gets only the columns that it
names, or all of them where it takes `**kwargs`. An entry of the result that is None or NaN means "not scored".
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import InputError, unknown

logger = logging.getLogger("jaxrl_llm.rewards")


@dataclass(frozen=True)
class Reward:
    """A reward function and how to use it.

    Raises InputError for a function that cannot be called or a number out of its range.
    """

    function: Callable[..., Any]
    weight: float = 1.0  # of this component in the total; finite, may be negative
    name: str = ""  # of the component; the function's own name if empty
    time_limit: float = 10.0  # seconds for a batch, > 0
    default: float = 0.0  # the score of a sample on which the function fails; finite, or NaN for "not scored"

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InputError(f"a reward needs a function, found {type(self.function).__name__}")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))
        if not math.isfinite(self.weight):
            raise InputError(f"reward {self.name!r}: weight must be finite, found {self.weight}")
        if not self.time_limit > 0:
            raise InputError(f"reward {self.name!r}: time_limit must be more than 0 seconds, found {self.time_limit}")
        if math.isinf(self.default):
            raise InputError(f"reward {self.name!r}: default must be finite or NaN, found {self.default}")


class Scores(NamedTuple):
    """What `score` found for N samples. NaN stands for "not scored"."""

    components: dict[str, np.ndarray]  # f32[N] per reward name, before weighting
    total: np.ndarray  # f32[N] weighted sum of the components that scored the sample; NaN if none did
    failures: dict[str, int]  # samples that got the default, per reward
    seconds: dict[str, float]  # wall-clock time of each function, at most about its limit


class _Outcome(NamedTuple):
    """What one function made of the batch: None or NaN values are "not scored", `failed` ones get the default."""

    values: np.ndarray  # f32[N]
    failed: np.ndarray  # bool[N]
    problem: str  # the first thing that went wrong, "" if nothing did
    seconds: float


def score(rewards: Sequence[Reward], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Scores:
    """Score N completions with every reward at once, each in a thread of its own.

    completions: N strings, or N lists of messages where prompts are conversations.
    columns: name -> N values: the columns of the data set, `prompts`, `completion_ids` and whatever else there is.

    A function that raises on the batch is tried again one sample at a time, so that only the samples on which it raises
    get its default. One that is not done within its time limit, or returns something else than N values, gets the
    default for the whole batch; a value that is infinite or no number, for that sample. Failures are logged, once per
    reward and call, and never raised. A hung function is left behind in its daemon thread, which does not keep the
    interpreter alive; only code that never lets go of the interpreter lock (a runaway regular expression, say) can
    hold up the caller.

    Raises InputError if there are no rewards, two share a name, or a column does not have N values.
    """
    count = len(completions)
    _check(rewards, count, columns)
    inputs = {**columns, "completions": completions}
    running = [(reward, time.monotonic(), _start(reward, inputs, count)) for reward in rewards]
    outcomes: dict[str, _Outcome] = {}
    # Shortest limit first: waiting for a patient reward must not give a less patient one more time than its own.
    for reward, start, future in sorted(running, key=lambda entry: entry[0].time_limit):
        try:
            outcomes[reward.name] = future.result(max(0.0, start + reward.time_limit - time.monotonic()))
        except TimeoutError:
            outcomes[reward.name] = _nothing(count, _late(reward), time.monotonic() - start)

    components, failures, seconds = {}, {}, {}
    for reward in rewards:
        outcome = outcomes[reward.name]
        components[reward.name] = np.where(outcome.failed, reward.default, outcome.values).astype(np.float32)
        failures[reward.name] = int(outcome.failed.sum())
        seconds[reward.name] = outcome.seconds
        if outcome.problem:
            logger.warning(
                "reward %r failed on %d of %d samples, which get %g: %s",
                *(reward.name, failures[reward.name], count, reward.default, outcome.problem),
            )
    return Scores(components, _combine(rewards, components), failures, seconds)


def require_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Raise InputError if a reward names a column, without a default value, that is not in `columns`.

    `score` would only log this at every batch: call it once, when a run starts. `completions` is always there.
    """
    known = {*columns, "completions"}
    for reward in rewards:
        for parameter in _parameters(reward.function):
            by_name = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if by_name and parameter.default is parameter.empty and parameter.name not in known:
                raise unknown(f"column that the reward {reward.name!r} needs,", parameter.name, known)


def _check(rewards: Sequence[Reward], count: int, columns: Mapping[str, Sequence[Any]]) -> None:
    if not rewards:
        raise InputError("no rewards: give at least one")
    names = [reward.name for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"two rewards are named {twice[0]!r}: give one of them another name")
    for name, column in columns.items():
        if isinstance(column, str) or not hasattr(column, "__len__") or len(column) != count:
            found = f"{len(column)} values" if hasattr(column, "__len__") else type(column).__name__
            raise InputError(f"column {name!r} needs a list of {count} values, one per completion; found {found}")


def _combine(rewards: Sequence[Reward], components: Mapping[str, np.ndarray]) -> np.ndarray:
    values = np.stack([components[reward.name] for reward in rewards]).astype(np.float64)  # [rewards, N]
    weights = np.array([[reward.weight] for reward in rewards])
    total = np.sum(weights * np.nan_to_num(values), axis=0)
    return np.where(np.isnan(values).all(axis=0), np.nan, total).astype(np.float32)


def _start(reward: Reward, inputs: Mapping[str, Sequence[Any]], count: int) -> Future[_Outcome]:
    """Run the function in a daemon thread. The pools of `concurrent.futures` are joined at exit, this is not."""
    future: Future[_Outcome] = Future()
    # The thread has lists of its own: a function may change them while its neighbours read theirs.
    arguments = {name: list(inputs[name]) for name in _wanted(reward.function, inputs)}
    deadline = time.monotonic() + reward.time_limit

    def run() -> None:
        future.set_result(_outcome(reward, arguments, count, deadline))

    threading.Thread(target=run, name=f"reward {reward.name}", daemon=True).start()
    return future


def _outcome(reward: Reward, arguments: Mapping[str, list[Any]], count: int, deadline: float) -> _Outcome:
    """Call the function on the batch and, if it raises, on one sample after the other. Raises nothing."""
    start = time.monotonic()
    try:
        values, failed, problem = _numbers(_call(reward.function, arguments, deadline), count)
        return _Outcome(values, failed, problem, time.monotonic() - start)
    except BaseException as error:  # sys.exit() in a reward, too, is only a reward that failed
        problem = _describe(error)

    values, failed = np.full(count, np.nan, np.float32), np.ones(count, bool)
    for sample in range(count):
        if time.monotonic() >= deadline:
            return _nothing(count, _late(reward), time.monotonic() - start)
        try:
            one = {name: column[sample : sample + 1] for name, column in arguments.items()}
            value, lost, why = _numbers(_call(reward.function, one, deadline), 1)
            values[sample], failed[sample] = value[0], lost[0]
            problem = problem or why
        except BaseException:  # counted as failed; the batch's own exception is the one that is logged
            continue
    return _Outcome(values, failed, problem, time.monotonic() - start)


def _call(function: Callable[..., Any], arguments: Mapping[str, list[Any]], deadline: float) -> Any:
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result

    async def within_limit(awaitable: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(awaitable, max(0.0, deadline - time.monotonic()))

    return asyncio.run(within_limit(result))


def _numbers(result: Any, count: int) -> tuple[np.ndarray, np.ndarray, str]:
    """A function's result as (values f32[N], failed bool[N], first problem)."""
    if isinstance(result, str | bytes | Mapping | AbstractSet) or not isinstance(result, Iterable):
        return *_lost(count), f"TypeError: returned {type(result).__name__}, not a list of {count} numbers"
    entries = list(result)
    if len(entries) != count:
        return *_lost(count), f"ValueError: returned {len(entries)} values for {count} samples"
    values, failed = _lost(count)
    problem = ""
    for sample, entry in enumerate(entries):
        try:
            values[sample] = _number(entry)
            failed[sample] = False
        except Exception as error:
            problem = problem or _describe(error)
    return values, failed, problem


def _number(entry: Any) -> np.float32:
    if entry is None:
        return np.float32(np.nan)
    is_scalar_array = getattr(entry, "shape", None) == () and not isinstance(entry, str | bytes)
    if not (isinstance(entry, Real) or is_scalar_array):
        raise TypeError(f"returned {type(entry).__name__}, not a number")
    with np.errstate(over="ignore"):
        value = np.float32(float(entry))
    if np.isinf(value):
        raise ValueError(f"returned {entry!r}, which is infinite in float32")
    return value


def _lost(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(count, np.nan, np.float32), np.ones(count, bool)


def _nothing(count: int, problem: str, seconds: float) -> _Outcome:
    return _Outcome(*_lost(count), problem, seconds)


def _late(reward: Reward) -> str:
    return f"TimeoutError: no result within its time limit of {reward.time_limit:g} s"


def _describe(error: BaseException) -> str:
    """The exception in one line of bounded length: a reward may put a whole completion into its message."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's parameters; any keyword where Python cannot tell, as for some built-in functions."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _wanted(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    parameters = _parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    return [name for name in names if takes_all or name in named]
