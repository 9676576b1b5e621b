"""The start of a run: its phases have names, what others wrote has time limits, and a signal always ends it.

Until the first step there is nothing to save, so that the process may end wherever it waits: in a call of the system,
in a library, or in a function that others wrote.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import PREEMPTED, Preempted, complain, interrupted, kill_children, stop_if

T = TypeVar("T")
SAID = 5.0  # seconds after which a phase is said for the first time; then after twice as many, and so on
GRACE = 1.0  # seconds in which a start may end by itself after a signal
INTERRUPTED = 130  # exit status after Ctrl-C
_TICK = 0.2  # seconds between two looks at signals and phases


class _Phase:
    """What a start is doing, as an infinitive without "to"."""

    def __init__(self, name: str, foreign: bool) -> None:
        self.name, self.foreign = name, foreign
        self.began, self.said = time.monotonic(), 0.0


_phases: list[_Phase] = []  # those that are open, the innermost last
_starts: list[_Start] = []  # the active one, if any


@contextmanager
def phase(name: str, foreign: bool = False) -> Iterator[None]:
    """Name what is being done, as in "load the model"; a start says it where it takes long.

    foreign: it runs code that others wrote, which has the start's time limit.
    """
    one = _Phase(name, foreign)
    _phases.append(one)
    try:
        yield
    except KeyboardInterrupt:
        for start in _starts:
            start.left = start.left or name
        raise
    finally:
        _phases.remove(one)


@contextmanager
def starting(seconds: float, option: str, grace: float = GRACE, said: float = SAID) -> Iterator[None]:
    """Context manager of a command's start, until `started` is called; within `preemptible` and `interruptible`.

    After SIGTERM or Ctrl-C the main thread has `grace` seconds to end by itself, and at a second signal none; the
    process then ends with status 75 or 130, whatever its threads wait for, and so do its child processes. It ends with
    status 2 where a phase of foreign code takes more than `seconds`; option: sets them. Phases are said on standard
    error from `said` seconds on. Outside the main thread nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = _Start(seconds, option, grace, said)
    _starts.append(start)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The handler in C writes there at once, even where the main thread is in a call that no signal ends.
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=start.watch, args=(reader,), daemon=True, name="start")
    thread.start()
    try:
        yield
    except KeyboardInterrupt as stop:
        if start.over.is_set():
            raise
        raise type(stop)(_stopped(isinstance(stop, Preempted), start.left)) from None
    finally:
        _starts.clear()
        start.end()
        signal.set_wakeup_fd(before)
        thread.join()
        os.close(reader)
        os.close(writer)


def started() -> None:
    """The start is over: from here on the run itself ends after a signal, and there may be something to save."""
    for start in _starts:
        start.end()


def limited(function: Callable[[], T], seconds: float, late: str, progress: Callable[[], Any] | None = None) -> T:
    """What a function of others returns, called in a daemon thread, which is abandoned if it hangs.

    seconds: that it may take; with `progress`, since what that returns has changed. late: the error after that.
    Raises what the function raises, InputError with `late`, and the deferred KeyboardInterrupt.
    """
    done, context = threading.Event(), copy_context()
    found: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(context.run(function))
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=work, daemon=True, name="limited call").start()
    since, mark = time.monotonic(), progress and progress()
    main = threading.current_thread() is threading.main_thread()  # which signals are for
    while not done.wait(min(_TICK, seconds)):
        stop_if(main and interrupted())
        if progress is not None and (now := progress()) != mark:
            since, mark = time.monotonic(), now
        if time.monotonic() - since >= seconds and not done.is_set():
            raise InputError(late)
    if errors:
        raise errors[0]
    return found[0]


class _Start:
    """A start that is watched by a thread of its own."""

    def __init__(self, seconds: float, option: str, grace: float, said: float) -> None:
        self._seconds, self._option, self._grace, self._said = seconds, option, grace, said
        self.over = threading.Event()
        self.left = ""  # the innermost phase that a KeyboardInterrupt left
        self._lock = threading.Lock()

    def end(self) -> None:
        """There is nothing to watch any more."""
        with self._lock:
            self.over.set()

    def watch(self, reader: int) -> None:
        """Until the end: say which phases take long, and end the process."""
        heard, until = 0, float("inf")
        while not self.over.is_set():
            if select.select([reader], [], [], _TICK)[0]:
                for number in os.read(reader, 64):
                    if number in (signal.SIGTERM, signal.SIGINT):
                        until = min(until, time.monotonic() + self._grace) if not heard else 0.0
                        heard = heard or number
            if time.monotonic() >= until:
                terminated, still = heard == signal.SIGTERM, ([""] + [one.name for one in list(_phases)])[-1]
                self._leave(_stopped(terminated, still), PREEMPTED if terminated else INTERRUPTED)
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for one in list(_phases):
            if one.foreign and now - one.began > self._seconds:
                self._leave(
                    f"error: it took more than {self._seconds:g} s to {one.name}, which {self._option} allows", 2
                )
        for one in list(_phases)[-1:]:
            if now - one.began > max(one.said, self._said):
                complain(f"{now - one.began:.0f} s so far to {one.name}")
                one.said = 2 * (now - one.began)

    def _leave(self, text: str, status: int) -> None:
        with self._lock:
            if self.over.is_set():  # meanwhile
                return
            complain(text)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            kill_children()
            os._exit(status)


def _stopped(terminated: bool, still: str) -> str:
    what, still = "stopped by SIGTERM" if terminated else "interrupted", still and f", still to {still}"
    return f"{what} before the first step{still}: nothing was written, the same command starts again"
