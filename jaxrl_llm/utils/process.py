"""What the library sets in its process: the heap's limits, the compilation cache, signals and output streams.

It imports JAX where it is needed, so that the command line starts without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_ARENAS = -8  # M_ARENA_MAX of mallopt
_listeners: list[Callable[[float], None]] = []  # called with the seconds of each compilation
_seconds: list[float] = []  # of each compilation that was counted
_compiling: set[int] = set()  # threads that compile, or fetch from the cache, right now
_outer: list[Callable[[], bool]] = []  # of the active `interruptible`, if any; signal handlers are per process
_preemption: list[_Preemption] = []  # of the active `preemptible`, if any
PREEMPTED = 75  # exit status of a run that SIGTERM ended, once its state is saved: EX_TEMPFAIL of sysexits.h


def limit_heap() -> None:
    """Make glibc's allocator retain little freed memory from now on; idempotent.

    Threads started later share one arena, so that one can reuse what another frees (unless MALLOC_ARENA_MAX or
    GLIBC_TUNABLES is set), and memory freed by a compilation is returned before the program runs. Together this lowers
    the peak memory of an update of SmolLM2 by 5 to 6 %, and keeps it from growing with the iterations. With other C
    libraries nothing happens.
    """
    if not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"} & set(os.environ):
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_ARENAS, 1)
    _listen(_trim)


def _trim(_: float) -> None:
    trim_heap()


def trim_heap() -> None:
    """Return the heap's free pages to the system.

    Called between rollout and update; otherwise memory freed by the rollout would add to the update's peak.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def default_cache_folder() -> Path:
    """The folder of the compilation cache, unless JAX is configured with another."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxrl_llm" / "xla"


def use_compile_cache() -> None:
    """Enable the compilation cache, so that later processes need not compile the same programs.

    A cache folder that is already configured (`jax_compilation_cache_dir`) is kept, as it is. In our own small programs
    are kept too, which by default are not: a run has some hundred, that take seconds together.
    """
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 (JAX defines it dynamically)
        jax.config.update("jax_compilation_cache_dir", str(default_cache_folder()))
        if getattr(jax.config, "jax_persistent_cache_min_compile_time_secs") == 1:  # noqa: B009 (JAX's default)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def count_compiles() -> None:
    """Start counting compilations in this process; idempotent."""
    _listen(_seconds.append)


def compiles() -> tuple[int, float]:
    """The number of programs compiled, or fetched from the cache, since `count_compiles`, and the seconds it took."""
    return len(_seconds), sum(_seconds)


def _listen(listener: Callable[[float], None]) -> None:
    """Call a listener with the seconds of each compilation from now on; idempotent."""
    import jax

    if not _listeners:
        jax.monitoring.register_event_listener(_began)
        jax.monitoring.register_event_duration_secs_listener(_heard)
    if listener not in _listeners:
        _listeners.append(listener)


def compiling() -> bool:
    """Whether a program is being compiled, or fetched from the cache, since `count_compiles`, in any thread.

    Only with the compilation cache, which asks for a program first. Tracing it, before that, does not count.
    """
    return bool(_compiling)


def _began(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/compile_requests_use_cache":
        _compiling.add(threading.get_ident())


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiling.discard(threading.get_ident())
        for listener in _listeners:
            listener(duration_secs)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Context manager that defers a first Ctrl-C; it yields a function that tells whether one has occurred.

    An exception raised by a signal handler may occur inside a JAX callback and be lost there; see `stop_if`.

    A second Ctrl-C raises KeyboardInterrupt as usual. Nested contexts yield the outermost one's function, so that a
    loop and the functions it calls share one flag. Outside the main thread the function always returns False. Within
    `preemptible`, the function reports SIGTERM too.
    """
    if _outer or threading.current_thread() is not threading.main_thread():
        yield _outer[0] if _outer else lambda: False
        return
    heard: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: Any) -> None:
        heard.append(number)
        signal.signal(signal.SIGINT, before)

    _outer.append(lambda: bool(heard) or any(state.heard and state.leave for state in _preemption))
    signal.signal(signal.SIGINT, remember)
    try:
        yield _outer[0]
    finally:
        _outer.clear()
        signal.signal(signal.SIGINT, before)


class Preempted(KeyboardInterrupt):
    """The deferred SIGTERM. A training run saves its state, and `jaxrl` ends with status 75."""


class _Preemption:
    """The flags of `preemptible`."""

    heard = False
    leave = True


@contextmanager
def preemptible(leave: bool = True) -> Iterator[Callable[[], bool]]:
    """Context manager that defers SIGTERM, with which schedulers announce that they will take the machine away.

    It yields a function that tells whether one has occurred. Further SIGTERMs are ignored: launchers and schedulers may
    each send one. Nested contexts share one flag; they set the handler again, because `jax.distributed.initialize`
    replaces it. Outside the main thread the function always returns False.

    leave: whether `interruptible` reports it, so that the step at hand is left; otherwise the step is to be finished.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    state, outermost = (_preemption[0], False) if _preemption else (_Preemption(), True)

    def remember(number: int, frame: Any) -> None:
        state.heard = True

    before, before_leave = signal.signal(signal.SIGTERM, remember), state.leave
    state.leave = leave
    if outermost:
        _preemption.append(state)
    try:
        yield lambda: state.heard
    finally:
        state.leave = before_leave
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: not a Python handler
        if outermost:
            _preemption.clear()


def stop_if(interrupted: bool) -> None:
    """Raise the deferred KeyboardInterrupt (Preempted after SIGTERM), at a point where it cannot be lost."""
    if interrupted:
        raise Preempted if any(state.heard for state in _preemption) else KeyboardInterrupt


def interrupted() -> bool:
    """Whether the active `interruptible`, if there is one, has deferred a signal."""
    return any(heard() for heard in _outer)


def kill_children() -> None:
    """Kill the processes that this one has started and that still run, where the system lists them (Linux)."""
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in path.read_text().split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)


def end_within(seconds: float, status: int) -> None:
    """End the process with a status after some seconds, if threads that others left behind keep it until then."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=end, daemon=True, name="end").start()


class FailsafeStream:
    """A text stream whose writes never fail: unencodable text is escaped, and after an error text is dropped.

    A closed pipe or a full disk must not end a run.

    stream: the underlying stream; None (standard output was closed before the start) drops everything.
    Other attributes, such as `encoding`, are those of the stream.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = stream is None or stream.closed  # whether further text is dropped

    def write(self, text: str) -> int:
        """Write the text, unless the stream has failed; returns its length either way."""
        if not self.lost:
            assert self._stream is not None
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = self._stream.encoding or "ascii"
                    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except (OSError, ValueError):  # OSError: no reader, or a full disk; ValueError: the stream is closed
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if possible."""
        if not self.lost:
            assert self._stream is not None
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lose()

    def isatty(self) -> bool:
        """Whether the stream is a terminal that has not failed."""
        return not self.lost and self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self) -> None:
        self.lost = True
        send_to_null(self._stream)


def send_to_null(stream: TextIO | None) -> None:
    """Redirect a stream whose writes fail to the null device.

    Otherwise its buffered text would fail again when the interpreter exits, with a message and status 120.
    """
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file descriptor, or closed
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()


def say(text: str) -> None:
    """Print a line at once; a failing standard output is ignored."""
    print(text, file=FailsafeStream(sys.stdout), flush=True)


def complain(text: str) -> None:
    """The same on standard error."""
    print(text, file=FailsafeStream(sys.stderr), flush=True)
