"""Reward functions in processes of their own, which can be ended."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.calling import Outcome, all_failed, error_line, time_limit_text
from jaxrl_llm.rewards.memory import machine_memory, resident
from jaxrl_llm.rewards.messages import receive, send
from jaxrl_llm.rewards.worker import Ready

logger = logging.getLogger("jaxrl_llm.rewards")

LOAD_LIMIT = 30.0  # seconds in which a reward must be loaded; what takes longer belongs into its first call
_GRACE = 0.25  # seconds after a time limit in which a process may say itself that it is late, and live on
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from jaxrl_llm.rewards.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


class ProcessFunction:
    """A reward function that is loaded and called in a process of its own, with this one's sys.path.

    name: as in `get_reward`, without a weight. folder: where the process runs; relative paths start there.

    `start` starts the process. It is killed if it takes too long or too much memory, and by `close`; after that, or
    after it ended itself, the next call starts another, in which the variables of the function's module start anew.
    The process gets JAX_PLATFORMS=cpu, so that a reward that uses JAX does not take the trainer's accelerator. What it
    prints goes to standard error. It ends when this process ends, even if this process is killed.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str] = ".") -> None:
        self.name = name
        self.folder = str(Path(folder).absolute())
        self.digest = ""  # SHA-256 of the file that was loaded; "" before, and where there is no file
        self.__name__ = name
        self.__signature__ = inspect.Signature()  # what inspect.signature finds, known when it is loaded
        self._path = [str(entry) for entry in sys.path]
        self._lock = threading.Lock()  # one call at a time
        self._worker: _Worker | None = None
        self._end = _no_worker
        self._loaded = False
        self._closed = False

    def start(self) -> None:
        """Start the process, which loads the function meanwhile, if there is none. InputError if that is impossible."""
        with self._lock:
            self._start()

    def load(self) -> None:
        """Wait until the function is loaded. InputError if it cannot be, or is not within LOAD_LIMIT seconds."""
        with self._lock:
            self._load()

    def close(self) -> None:
        """End the process at once, even a busy one. A later call starts another."""
        self._closed = True
        if (worker := self._worker) is not None:
            _kill(worker)  # a thread that waits for it holds the lock, and releases it now
        with self._lock:
            self._forget()

    def run(
        self, arguments: Mapping[str, list[Any]], count: int, limit: float, memory_limit: float | None = None
    ) -> Outcome:
        """Call the function on `count` samples within `limit` seconds; see `calling.outcome`. Raises nothing.

        memory_limit: bytes that the process and its children may hold; half of the machine's memory if None.
        """
        with self._lock:
            self._closed = False
            try:
                worker = self._load()
            except InputError as error:
                return all_failed(count, str(error), 0.0)
            columns = {}
            for name, values in arguments.items():
                try:
                    columns[name] = pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
                except Exception as error:
                    return all_failed(count, f"column {name!r} cannot be sent to its process: {error_line(error)}", 0.0)
            start = time.monotonic()
            try:
                found = self._ask(worker, (columns, count, limit, limit), limit + _GRACE, memory_limit)
                return Outcome(*found)._replace(seconds=time.monotonic() - start)
            except _Late:
                cause = f"{time_limit_text(limit)}; its process was ended"
            except _Ended as ended:
                cause = "closed while it scored" if self._closed else f"its process {ended}"
            return all_failed(count, cause, time.monotonic() - start)

    def __call__(self, completions: list[Any], **columns: list[Any]) -> list[float]:
        """Score completions, as the function itself would, but within 10 seconds: N numbers, NaN for "not scored".

        Raises InputError with the first thing that went wrong.
        """
        found = self.run({"completions": completions, **columns}, len(completions), 10.0)
        if any(found.failed):
            raise InputError(f"reward {self.__name__!r}: {found.problem}")
        return found.values

    def __repr__(self) -> str:
        return f"ProcessFunction({self.name!r})"

    def _start(self) -> _Worker:
        if self._worker is None:
            try:
                self._worker = _start(self.name, self.folder, self._path)
            except OSError as error:
                raise InputError(f"cannot start a process for the reward {self.name!r}: {error_line(error)}") from error
            self._loaded = False
            # Also when nobody refers to this function any more, and when the interpreter ends.
            self._end = weakref.finalize(self, _end, self._worker, os.getpid())
        return self._worker

    def _load(self) -> _Worker:
        if self._worker is not None and self._loaded:
            if not _has_ended(self._worker):
                return self._worker
            logger.warning("the process of reward %r %s; starting another", self.__name__, _how(self._worker.process))
            self._forget()
        worker = self._start()
        try:
            answer = self._ask(worker, None, LOAD_LIMIT)
        except _Ended as ended:
            what = f"did not load them in {LOAD_LIMIT:g} s"
            if not isinstance(ended, _Late):
                what = f"{ended} while it loaded them"
            raise InputError(f"cannot load rewards from {_source(self.name)!r}: its process {what}") from ended
        if not isinstance(answer, Ready):
            self._forget()
            raise InputError(answer)
        if self.digest not in ("", answer.digest):
            logger.warning(
                "%s has changed since it was first loaded: the new code scores from here on", _source(self.name)
            )
        self.__name__, self.digest, self._loaded = answer.name, answer.digest, True
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, getattr(inspect.Parameter, kind), default=None if optional else inspect._empty)
                for name, kind, optional in answer.parameters
            ]
        )
        return worker

    def _ask(self, worker: _Worker, message: Any, seconds: float, memory_limit: float | None = None) -> Any:
        try:
            return _ask(worker, message, seconds, memory_limit)
        except BaseException:  # Ctrl-C too: a late answer would be taken for the next batch's
            self._forget()
            raise

    def _forget(self) -> None:
        self._end()
        self._worker = None


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]  # the first of its group
    connection: socket.socket
    life: int  # the end of a pipe: the process ends when it is closed, see `worker`


class _Ended(Exception):
    """A process gave no answer; it has ended or must be killed. The text says why, after the words "its process"."""


class _Late(_Ended):
    """A process gave no answer in time."""


def _no_worker() -> None:
    """Nothing to end."""


def _source(name: str) -> str:
    """The file or module in a reward's name."""
    return name.rpartition(":")[0] or name if "(" not in name else name


def _start(name: str, folder: str, path: list[str]) -> _Worker:
    ours, its = socket.socketpair()
    other_end, life = os.pipe()
    try:
        process = subprocess.Popen(
            # -P: files in the folder do not shadow modules before the program has set sys.path.
            [sys.executable, "-P", "-c", _PROGRAM, str(its.fileno()), str(other_end), *path],
            pass_fds=(its.fileno(), other_end),
            stdin=subprocess.DEVNULL,
            stdout=2,  # prints of a reward are no output of ours
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
    except BaseException:
        ours.close()
        os.close(life)
        raise
    finally:
        its.close()
        os.close(other_end)
    with contextlib.suppress(OSError):  # it may have ended already; `_ask` finds out
        send(ours, name)
    return _Worker(process, ours, life)


def _ask(worker: _Worker, message: Any, seconds: float, memory_limit: float | None) -> Any:
    """Send a message, unless it is None, and wait for an answer. After _Ended the process is of no more use."""
    deadline = time.monotonic() + seconds

    def look() -> None:
        if _has_ended(worker):
            raise EOFError  # its children may hold the connection open
        most = machine_memory() / 2 if memory_limit is None else memory_limit
        if resident(worker.process.pid) > most:
            raise _Ended(f"took more than {most / 1e9:.3g} GB and was ended")

    try:
        if message is not None:
            send(worker.connection, message, deadline)
        return receive(worker.connection, deadline, look)
    except _Ended:
        raise
    except TimeoutError as error:
        raise _Late from error
    except Exception as error:  # the connection is closed; or what came is no pickle, if the reward wrote it
        _kill(worker)
        raise _Ended(_how(worker.process)) from error


def _has_ended(worker: _Worker) -> bool:
    """Whether the process has ended. It is not waited for, so its number stays its own."""
    return os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _how(process: subprocess.Popen[bytes]) -> str:
    status = process.wait()
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"ended by signal {-status} ({signal.Signals(-status).name})"
    return f"ended by signal {-status}"


def _kill(worker: _Worker) -> None:
    """End the process and its children. A process that was ending keeps its own status."""
    if worker.process.returncode is None:  # else its number may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)


def _end(worker: _Worker, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the trainer that ends: the process is not its own
        return
    _kill(worker)
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(5)
    worker.connection.close()
    os.close(worker.life)
