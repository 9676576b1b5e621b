"""Reward functions that run in a process of their own, which can be killed."""

import inspect
import logging
import math
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.workers import child
from jaxrl_llm.rewards.workers.calling import CallInfo, CallMode, CallOutcome, Lost, time_limit_text
from jaxrl_llm.rewards.workers.limits import GRACE, within_limits
from jaxrl_llm.rewards.workers.worker import Ready, ScoreRequest
from jaxrl_llm.utils.errors import InputError, error_line
from jaxrl_llm.utils.starting import phase

logger = logging.getLogger("jaxrl_llm.rewards")

LOAD_LIMIT = 30.0  # seconds for loading a reward; slower initialisation belongs in its first call


class ProcessFunction:
    """A reward function that is loaded and called in a process of its own, with this process's sys.path.

    name: as in `get_reward`, without a weight. folder: working directory of the process, for relative paths. payload:
    the pickled function itself, which then is not looked up by its name.

    `start_child` starts the process. It is killed by `close`, and if it exceeds its time or memory limit. After that,
    or if it exits, the next call starts a new process, in which the function's module is loaded again. It has
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
        self._lock = threading.RLock()  # one call at a time
        self._worker: child.Child | None = None
        self._end: Callable[[], object] = lambda: None
        self._loaded = self._warm = False
        self._closed = False

    def start(self) -> child.Child:
        """Start the process, unless it is running; it begins to load the function. InputError if it cannot start."""
        with self._lock:
            if self._worker is None:
                try:
                    self._worker = child.start_child(self._payload or self.name, self.folder, self._path)
                except OSError as error:
                    why = error_line(error)
                    raise InputError(f"cannot start a process for the reward {self.name!r}: {why}") from error
                self._loaded = False
                # Runs also when this object is garbage collected and when the interpreter exits.
                self._end = weakref.finalize(self, child.end, self._worker, os.getpid())
            return self._worker

    def load(self) -> child.Child:
        """Wait until the function is loaded. InputError if loading fails or takes more than LOAD_LIMIT seconds."""
        with self._lock:
            if self._worker is not None and self._loaded:
                if not child.has_ended(self._worker):
                    return self._worker
                how = child.how_it_ended(self._worker.process)
                logger.warning("the process of reward %r %s; starting another", self.__name__, how)
                self._forget()
            worker = self.start()
            try:
                with phase(f"load rewards from {_source(self.name)!r}"):
                    answer = self._ask(worker, None, LOAD_LIMIT)
            except (child.ProcessEnded, TimeoutError) as ended:
                is_late = isinstance(ended, TimeoutError)
                what = f"did not load them in {LOAD_LIMIT:g} s" if is_late else f"{ended} while it loaded them"
                raise InputError(f"cannot load rewards from {_source(self.name)!r}: its process {what}") from ended
            if not isinstance(answer, Ready):
                self._forget()
                raise InputError(answer)
            if self.digest not in ("", answer.digest):
                text = "%s has changed since it was first loaded: the new code is used from now on"
                logger.warning(text, _source(self.name))
            self.__name__, self.digest, self._loaded = answer.name, answer.digest, True
            self._warm = not answer.warms_up
            self.provides, self.per_sample, self.own_limits = answer.provides, answer.per_sample, answer.own_limits
            self.wants_texts, self.reads_environments = answer.wants_texts, answer.reads_environments
            takes = [
                inspect.Parameter(name, getattr(inspect.Parameter, kind), default=None if optional else inspect._empty)
                for name, kind, optional in answer.parameters
            ]
            self.__signature__ = inspect.Signature(takes)
            return worker

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
        given: CallInfo | None = None,
    ) -> CallOutcome:
        """Call the function on `count` samples with `limit` seconds for each; see `limits`. Never raises.

        memory_limit: most resident bytes of the process and its children; None: half of the machine's memory.
        """
        with self._lock:
            self._closed = False
            try:
                self.load()
            except InputError as error:
                return Lost(str(error)).outcome(count)
            calls = partial(self._calls, arguments, memory_limit, given or CallInfo())
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

    def _calls(
        self,
        arguments: Mapping[str, list[Any]],
        memory: float | None,
        given: CallInfo,
        places: Sequence[int],
        how: CallMode,
    ) -> Iterator[CallOutcome | Lost]:
        """`limits.Calls`. A process that does not answer is ended, and its last result is `Lost`."""
        count = len(places) if how.each else 1
        columns: dict[str, bytes] = {}
        for name, values in arguments.items():
            try:
                columns[name] = pickle.dumps([values[place] for place in places], pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                yield from [Lost(f"column {name!r} cannot be sent to its process: {error_line(error)}")] * count
                return
        if self._closed:  # meanwhile: no other process is started for the samples that are left
            yield from [Lost("closed while it scored")] * len(places)
            return
        message: ScoreRequest | None = ScoreRequest(columns, len(places), given, how)
        open_calls = 0  # whose answers nobody took
        try:
            worker = self.load()
            grace = 0.0 if math.isinf(how.seconds) else GRACE
            if not self._warm:
                self._ask(worker, None, LOAD_LIMIT)
                self._warm = True
            for left in reversed(range(count)):
                found = self._ask(worker, message, how.seconds + grace, memory)
                message, open_calls = None, left
                yield found
        except InputError as error:
            yield Lost(str(error))
        except TimeoutError:
            yield Lost(f"{time_limit_text(how.seconds)}; its process was ended", late=True)
        except child.ProcessEnded as ended:
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


def _source(name: str) -> str:
    return name.rpartition(":")[0] or name if "(" not in name else name
