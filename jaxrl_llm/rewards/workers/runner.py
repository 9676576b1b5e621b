"""Run reward functions in parallel, each within its time limit, and combine their scores.

A reward is a plain Python function with the signature that TRL's trainers use,

    def reward(completions, **columns) -> list[float]          # or async def

called by keyword with lists of length N: `completions`, and those columns of the batch that it has parameters for, or
all of them if it takes `**kwargs`; and with TRL's `trainer_state`, `log_metric` and `log_extra`. An entry of the result
that is None or NaN means "not scored". A function may also return a dict of lists, or a list of dicts, with the scores
under "reward" and further entries beside them; see `entries`.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rewards.entries import SPANS, Entries, provided
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.rewards.workers.calling import (
    ENVIRONMENTS,
    LOG_EXTRA,
    LOG_METRIC,
    REPLY_START,
    TRAINER_STATE,
    CallInfo,
    CallOutcome,
    Logged,
    Lost,
    parameters_of,
    wants_texts,
)
from jaxrl_llm.rewards.workers.limits import thread_calls, within_limits
from jaxrl_llm.rewards.workers.process import ProcessFunction
from jaxrl_llm.utils.errors import InputError, error_line, shown, unknown

logger = logging.getLogger("jaxrl_llm.rewards")
_LARGEST = float(np.finfo(np.float32).max)
_LONGEST = 1e6  # seconds of a time limit
_GIVEN = (TRAINER_STATE, LOG_METRIC, LOG_EXTRA)
NO_STATE = {"global_step": 0, "max_steps": 0, "epoch": 0.0}  # of a call outside of a run


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight and limits.

    A plain Python function runs in a thread of this process. Threads cannot be killed: one that hangs is abandoned, and
    code that never releases the GIL (a runaway regular expression, a loop in C) blocks the whole process. Put such a
    function in a file: `get_reward("file.py:function")` runs it in a process that can be killed.

    Raises InputError for a function that is not callable or a number out of range.
    """

    function: Callable[..., Any]
    weight: float = 1.0  # of this component in the total; finite, may be negative
    name: str = ""  # of the component; by default the function's name
    time_limit: float = 10.0  # seconds for a sample, above 0 and at most 1e6; see `limits`
    default: float = 0.0  # score of a sample on which the function raises; finite, or NaN for "not scored"
    memory_limit: float | None = None  # bytes of the function's process, if it has one; None: half of the machine's
    digest: str = ""  # of the function's code, by which a resumed run compares it; "" if its process knows, or none
    note: str = ""  # what a run says of it when it begins

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InputError(f"a reward needs a function, found {type(self.function).__name__}")
        if not isinstance(self.name, str):
            raise InputError(f"a reward's name is {shown(self.name)}, but must be text")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))
        try:
            provided(self.function)
        except TypeError as error:
            raise InputError(f"reward {self.name!r}: {error}") from None
        memory = math.inf if self.memory_limit is None else self.memory_limit
        for field, value, good, wanted in [
            ("weight", self.weight, math.isfinite, "a finite number"),
            ("time_limit", self.time_limit, lambda x: 0 < x <= _LONGEST, "above 0 and at most 1e6 seconds"),
            ("default", self.default, lambda x: not abs(x) > _LARGEST, "finite in float32, or NaN for not scored"),
            ("memory_limit", memory, lambda x: x > 0, "above 0 bytes, or None for half of the machine's memory"),
        ]:
            if not isinstance(value, Real) or not good(float(value)):
                raise InputError(f"reward {self.name!r}: {field} is {value!r}, but must be {wanted}")


class Scores(NamedTuple):
    """The scores of N samples. NaN means "not scored"."""

    components: dict[str, np.ndarray]  # f32[N] per reward name, before weighting
    total: np.ndarray  # f32[N], weighted sum of the components that scored the sample; NaN if none did
    failures: dict[str, int]  # number of samples that got the default, per reward
    seconds: dict[str, float]  # wall-clock time of each function, roughly bounded by its limit
    entries: Mapping[str, list[Any]] = {}  # what else functions returned, N values each; None where there is none
    logged: Logged = Logged()  # what functions logged

    @property
    def scored(self) -> dict[str, float]:
        """The share of the samples that each reward scored.

        The mean of `total` is the sum of weight x share x mean over the scored ones, if each sample has a total.
        """
        return {name: float(np.mean(~np.isnan(x))) if x.size else 0.0 for name, x in self.components.items()}


def score(
    rewards: Sequence[Reward], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]],
    state: Mapping[str, Any] | None = None,
) -> Scores:  # fmt: skip
    """Score N completions with all rewards in parallel.

    completions: N strings, or N lists of messages if prompts are conversations. A function that declares
    `completions: list[str]` gets the text of the last reply for such a list.
    columns: name -> N values: the columns of the data set, `prompts`, `completion_ids` and so on.
    state: attributes of the `trainer_state` that functions get, such as global_step. None: no run, so that functions
    with **kwargs get no `trainer_state`, `log_metric` and `log_extra`, but those that name them do.

    The function is called with all samples, and if that call fails or exceeds its time limit, again for each sample, so
    that only those samples are lost on which it fails too; see `limits`. A sample on which it raises gets its default,
    and one on which it exceeds a limit of time or memory is not scored. If it does not return N values, the whole batch
    gets the default; if a value is infinite or not a number, that sample does. Both are failures: they are logged, once
    per reward and call, and never raised.

    Functions from `get_reward` run in processes (see `process`). A process that exceeds a limit is killed, and another
    one goes on with the next sample. A plain Python function that hangs is abandoned in a daemon thread, which does not
    keep the interpreter alive; see `Reward`.

    Of entries with the same name, those of the first reward count; spans add up, with the weights of their rewards.

    Raises InputError if there are no rewards, two share a name, or a column does not have N values.
    """
    _check(rewards, completions, columns)
    count = len(completions)
    inputs = {**columns, "completions": completions}
    running = [(reward, _start(reward, inputs, count, state)) for reward in rewards]
    outcomes = {reward.name: future.result() for reward, future in running}

    components, failures, seconds = {}, {}, {}
    for reward in rewards:
        found = outcomes[reward.name]
        components[reward.name] = np.where(found.failed, reward.default, found.values).astype(np.float32)
        failures[reward.name] = sum(found.failed) + sum(found.late)
        seconds[reward.name] = found.seconds
        if found.problem:
            logger.warning("reward %r %s: %s", reward.name, _lost(found, count, reward.default), found.problem)
    total = weighted_reward(rewards, components)
    if count and np.isnan(total).all():
        why = "they fail, or return None or NaN" if any(failures.values()) else "they return None or NaN"
        logger.warning("no reward scored any of the %d completions: %s (%s)", count, why, ", ".join(components))
    all_of_them = [outcomes[reward.name].logged for reward in rewards]
    extras = {name: column for one in all_of_them for name, column in one.extras.items()}
    logged = Logged([metric for one in all_of_them for metric in one.metrics], extras)
    return Scores(components, total, failures, seconds, _entries(rewards, outcomes, count), logged)


def close_rewards(rewards: Iterable[Reward]) -> None:
    """Kill the processes of rewards, even busy ones. Scoring again starts new ones. Done automatically at exit."""
    for reward in rewards:
        if isinstance(reward.function, ProcessFunction):
            reward.function.close()


def reward_digest(reward: Reward) -> str:
    """SHA-256, in hexadecimal, of the file that a reward of `get_reward` was loaded from, or of a reward model's files.

    For a built-in reward this is a file of the library; the pattern of `format_match` is not included. "" for a plain
    function, and for a module without a file.
    """
    own = getattr(reward.function, "digest", "")  # of a process, or of a reward model
    return reward.digest or (own if isinstance(own, str) else "")


def require_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Raise InputError if a reward has a parameter without a default value that is not in `columns`.

    Also if it takes no parameters, or needs positional-only ones, since it is called by keyword. `completions` always
    exists. Call this once when a run starts: `score` would only log the problem for every batch.
    """
    if columns is None or isinstance(columns, str):
        raise InputError(f"columns is {shown(columns)}, but must be a list of names")
    known = {*columns, "completions", REPLY_START, TRAINER_STATE, LOG_METRIC, LOG_EXTRA}
    for reward in rewards:
        taken = parameters_of(reward.function)
        if not taken or any(one.kind is one.POSITIONAL_ONLY and one.default is one.empty for one in taken):
            raise InputError(
                f"reward {reward.name!r} must take completions by name: def {reward.name}(completions, **_)"
            )
        for parameter in taken:
            by_name = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if by_name and parameter.default is parameter.empty and parameter.name not in known:
                if parameter.name == ENVIRONMENTS:
                    raise InputError(
                        f"the reward {reward.name!r} reads environments, but there are none: give --environment "
                        "MODULE:NAME"
                    )
                raise unknown(f"column that the reward {reward.name!r} needs,", parameter.name, known)


def _check(rewards: Sequence[Reward], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
    if not isinstance(rewards, list | tuple) or not all(isinstance(reward, Reward) for reward in rewards):
        raise InputError(f"rewards must be a list of Reward, found {shown(rewards)}: score([Reward(function)], ...)")
    if not rewards:
        raise InputError("no rewards: give at least one")
    if isinstance(completions, str) or not hasattr(completions, "__len__"):
        raise InputError(f"completions must be a list of texts or of messages, found {type(completions).__name__}")
    if not isinstance(columns, Mapping):
        raise InputError(f"columns must be a dict of lists, found {type(columns).__name__}")
    count = len(completions)
    names = [reward.name for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"two rewards are named {twice[0]!r}: give one of them another name")
    for name, column in columns.items():
        if isinstance(column, str) or not hasattr(column, "__len__") or len(column) != count:
            found = f"{len(column)} values" if hasattr(column, "__len__") else type(column).__name__
            raise InputError(f"column {name!r} needs a list of {count} values, one per completion; found {found}")


def weighted_reward(rewards: Sequence[Reward], components: Mapping[str, np.ndarray]) -> np.ndarray:
    """f32[N]: the weighted sum of the components that scored a sample; NaN if none did."""
    values = np.stack([components[reward.name] for reward in rewards]).astype(np.float64)  # [rewards, N]
    total = np.sum(np.array([[reward.weight] for reward in rewards]) * np.nan_to_num(values), axis=0)
    return np.where(np.isnan(values).all(axis=0), np.nan, total).astype(np.float32)


def _entries(rewards: Sequence[Reward], outcomes: Mapping[str, CallOutcome], count: int) -> Entries:
    """The entries that the functions returned, or declare to return: those of the first function with the name."""
    out: dict[str, list[Any]] = {}
    for reward in rewards:
        found = outcomes[reward.name].entries
        for name in dict.fromkeys([*provided(reward.function), *found]):
            column = found.get(name, [None] * count)
            if name == SPANS:
                pairs = zip(out.get(SPANS, [None] * count), column, strict=True)
                out[SPANS] = [
                    before if new is None else [*(before or []), *([at, end, x * reward.weight] for at, end, x in new)]
                    for before, new in pairs
                ]
            out.setdefault(name, column)
    return out


def _lost(found: CallOutcome, count: int, default: float) -> str:
    failed, late = sum(found.failed), sum(found.late)
    if not failed + late:
        return f"was called again for each of {count} samples, because a call for all did not end well"
    each = [f"{failed} get {default:g}"] * bool(failed) + [f"{late} are not scored"] * bool(late)
    what = each[0].partition(" ")[2] if len(each) == 1 else " and ".join(each)
    return f"failed on {failed + late} of {count} samples, which {what}"


def _start(
    reward: Reward, inputs: Mapping[str, Sequence[Any]], count: int, state: Mapping[str, Any] | None
) -> Future[CallOutcome]:
    """Run the function in a daemon thread, which, unlike the pools of `concurrent.futures`, is not joined at exit."""
    future: Future[CallOutcome] = Future()
    function, limit = reward.function, reward.time_limit
    in_process = isinstance(function, ProcessFunction)
    names = _wanted(function, [name for name in inputs if name != ENVIRONMENTS or not in_process])
    arguments = {name: list(inputs[name]) for name in names}
    given = CallInfo(tuple(_wanted(function, _GIVEN, of_all=state is not None)), state or NO_STATE)

    def run() -> None:
        try:
            if function.wants_texts if isinstance(function, ProcessFunction) else wants_texts(function):
                arguments["completions"] = [text_of(one) for one in arguments["completions"]]
            if isinstance(function, ProcessFunction):
                found = function.run(arguments, count, limit, reward.memory_limit, given)
            else:
                flags = (bool(getattr(function, name, False)) for name in ("per_sample", "own_limits"))
                found = within_limits(partial(thread_calls, function, arguments, given), count, limit, *flags)
        except BaseException as error:  # e.g. MemoryError while copying a column
            found = Lost(error_line(error)).outcome(count)
        future.set_result(found)

    threading.Thread(target=run, name=f"reward {reward.name}", daemon=True).start()
    return future


def _wanted(function: Callable[..., Any], names: Iterable[str], of_all: bool = True) -> list[str]:
    """The arguments that a function names. of_all: all but REPLY_START if it takes **kwargs."""
    takes = parameters_of(function)
    takes_all = of_all and any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes)
    named = {parameter.name for parameter in takes}
    return [name for name in names if (takes_all and name != REPLY_START) or name in named]
