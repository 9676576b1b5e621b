"""Reward functions that run in a process of their own, which can be killed."""

from __future__ import annotations

import inspect
import logging
import math
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.workers import child
from jaxrl_llm.rewards.workers.calling import Given, Lost, Outcome, time_limit_text
from jaxrl_llm.rewards.workers.limits import GRACE, within_limits
from jaxrl_llm.rewards.workers.worker import Asked, Ready
from jaxrl_llm.utils.errors import InputError, error_line
from jaxrl_llm.utils.starting import phase

logger = logging.getLogger("jaxrl_llm.rewards")

LOAD_LIMIT = 30.0  # seconds for loading a reward; slower initialisation belongs in its first call


class ProcessFunction:
    """A reward function that is loaded and called in a process of its own, with this process's sys.path.

    name: as in `get_reward`, without a weight. folder: working directory of the process, for relative paths. payload:
    the pickled function itself, which then is not looked up by its name.

    `start` starts the process. It is killed by `close`, and if it exceeds its time or memory limit. After that, or if
    it exits, the next call starts a new process, in which the function's module is loaded again. The process has
    JAX_PLATFORMS=cpu, so that a reward that uses JAX does not claim the trainer's accelerator. Its output goes to
    standard error. It exits with this process, even if this process is killed.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str] = ".", payload: bytes | None = None) -> None:
        self.name, self._payload = name, payload
        self.folder = str(Path(folder).absolute())
        self.digest = ""  # SHA-256 of the loaded file; "" before loading, and if there is no file
        self.provides: tuple[str, ...] = ()  # entries that the function always returns; set when it is loaded
        self.per_sample = self.own_limits = False  # attributes of the function, see `limits`; set when it is loaded
        self.wants_texts = self.reads_environments = False  # see `calling`; set when it is loaded
        self.__name__ = name
        self.__signature__ = inspect.Signature()  # for inspect.signature; set when the function is loaded
        self._path = [str(entry) for entry in sys.path]
        self._lock = threading.Lock()  # one call at a time
        self._worker: child.Child | None = None
        self._end = _nothing
        self._loaded = self._warm = False
        self._closed = False

    def start(self) -> None:
        """Start the process, unless it is running; it begins to load the function. InputError if it cannot start."""
        with self._lock:
            self._start()

    def load(self) -> None:
        """Wait until the function is loaded. InputError if loading fails or takes more than LOAD_LIMIT seconds."""
        with self._lock:
            self._load()

    def close(self) -> None:
        """Kill the process immediately, even if it is busy. A later call starts a new one."""
        self._closed = True
        if (worker := self._worker) is not None:
            child.kill(worker)  # a thread that waits for the process holds the lock; this makes it release the lock
        with self._lock:
            self._forget()

    def run(
        self,
        arguments: Mapping[str, list[Any]],
        count: int,
        limit: float,
        memory_limit: float | None = None,
        given: Given | None = None,
    ) -> Outcome:
        """Call the function on `count` samples with `limit` seconds for each; see `limits`. Never raises.

        memory_limit: most resident bytes of the process and its children; None: half of the machine's memory.
        """
        with self._lock:
            self._closed = False
            try:
                self._load()
            except InputError as error:
                return Lost(str(error)).outcome(count)
            calls = _ProcessCalls(self, arguments, count, memory_limit, given or Given())
            return within_limits(calls, count, limit, self.per_sample, self.own_limits)

    def __call__(self, completions: list[Any], **columns: list[Any]) -> list[float]:
        """Score completions as the function itself would, within 10 seconds each: N numbers, NaN for "not scored".

        Raises InputError with the first problem.
        """
        found = self.run({"completions": completions, **columns}, len(completions), 10.0)
        if any(found.failed) or any(found.late):
            raise InputError(f"reward {self.__name__!r}: {found.problem}")
        return found.values

    def __repr__(self) -> str:
        return f"ProcessFunction({self.name!r})"

    def _start(self) -> child.Child:
        if self._worker is None:
            try:
                self._worker = child.start(self._payload or self.name, self.folder, self._path)
            except OSError as error:
                raise InputError(f"cannot start a process for the reward {self.name!r}: {error_line(error)}") from error
            self._loaded = False
            # Runs also when this object is garbage collected and when the interpreter exits.
            self._end = weakref.finalize(self, child.end, self._worker, os.getpid())
        return self._worker

    def _load(self) -> child.Child:
        if self._worker is not None and self._loaded:
            if not child.has_ended(self._worker):
                return self._worker
            logger.warning(
                "the process of reward %r %s; starting another", self.__name__, child.how_it_ended(self._worker.process)
            )
            self._forget()
        worker = self._start()
        try:
            with phase(f"load rewards from {_source(self.name)!r}"):
                answer = self._ask(worker, None, LOAD_LIMIT)
        except child.Ended as ended:
            what = f"did not load them in {LOAD_LIMIT:g} s"
            if not isinstance(ended, child.Late):
                what = f"{ended} while it loaded them"
            raise InputError(f"cannot load rewards from {_source(self.name)!r}: its process {what}") from ended
        if not isinstance(answer, Ready):
            self._forget()
            raise InputError(answer)
        if self.digest not in ("", answer.digest):
            logger.warning(
                "%s has changed since it was first loaded: the new code is used from now on", _source(self.name)
            )
        self.__name__, self.digest, self._loaded = answer.name, answer.digest, True
        self._warm = not answer.warms_up
        self.provides, self.per_sample, self.own_limits = answer.provides, answer.per_sample, answer.own_limits
        self.wants_texts, self.reads_environments = answer.wants_texts, answer.reads_environments
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, getattr(inspect.Parameter, kind), default=None if optional else inspect._empty)
                for name, kind, optional in answer.parameters
            ]
        )
        return worker

    def ask(self, asked: Asked, memory_limit: float | None) -> Iterator[Outcome | Lost]:
        """Make the calls of a message. A process that does not answer is ended, and its last result is `Lost`."""
        message: Asked | None = asked
        open_calls = 0  # whose answers nobody took
        if self._closed:  # meanwhile: no other process is started for the samples that are left
            yield from [Lost("closed while it scored")] * asked.number
            return
        try:
            worker, grace = self._load(), 0.0 if math.isinf(asked.seconds) else GRACE
            if not self._warm:
                self._ask(worker, None, LOAD_LIMIT)
                self._warm = True
            for left in reversed(range(asked.number if asked.each else 1)):
                found = self._ask(worker, message, asked.seconds + grace, memory_limit)
                message, open_calls = None, left
                yield found
        except InputError as error:
            yield Lost(str(error))
        except child.Late:
            yield Lost(f"{time_limit_text(asked.seconds)}; its process was ended", late=True)
        except child.Ended as ended:
            yield Lost("closed while it scored" if self._closed else f"its process {ended}", ended.late)
        finally:
            if open_calls:  # or they would be mistaken for those of the next message
                self._forget()

    def _ask(self, worker: child.Child, message: Any, seconds: float, memory_limit: float | None = None) -> Any:
        try:
            return child.ask(worker, message, seconds, memory_limit)
        except BaseException:  # Ctrl-C too, because a late answer would be mistaken for that of the next call
            self._forget()
            raise

    def _forget(self) -> None:
        self._end()
        self._worker = None


@dataclass(frozen=True)
class _ProcessCalls:
    """The calls of one batch; see `limits.Calls`."""

    function: ProcessFunction
    arguments: Mapping[str, list[Any]]
    count: int
    memory_limit: float | None
    given: Given

    def whole(self, seconds: float) -> Outcome | Lost:
        asked = self._asked(range(self.count), seconds, False, False)
        return asked if isinstance(asked, Lost) else next(self.function.ask(asked, self.memory_limit))

    def each(self, places: Sequence[int], seconds: float, at_once: bool) -> Iterator[Outcome | Lost]:
        asked = self._asked(places, seconds, True, at_once)
        if isinstance(asked, Lost):
            yield from [asked] * len(places)
        else:
            yield from self.function.ask(asked, self.memory_limit)

    def _asked(self, places: Sequence[int], seconds: float, each: bool, at_once: bool) -> Asked | Lost:
        columns = {}
        for name, values in self.arguments.items():
            try:
                columns[name] = pickle.dumps([values[place] for place in places], pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                return Lost(f"column {name!r} cannot be sent to its process: {error_line(error)}")
        return Asked(columns, len(places), seconds, self.given, each, at_once)


def _nothing() -> None:
    """There is no process to kill."""


def _source(name: str) -> str:
    return name.rpartition(":")[0] or name if "(" not in name else name
