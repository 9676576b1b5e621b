"""Deferred Ctrl-C: an exception raised by a signal handler may occur inside a JAX callback and be lost there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_outer: list[Callable[[], bool]] = []  # of the active context, if any; signal handlers are per process


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Context manager that defers a first Ctrl-C; it yields a function that tells whether one has occurred.

    A second Ctrl-C raises KeyboardInterrupt as usual. Nested contexts yield the outermost one's function, so that a
    loop and the functions it calls share one flag. Outside the main thread the function always returns False.
    """
    if _outer or threading.current_thread() is not threading.main_thread():
        yield _outer[0] if _outer else lambda: False
        return
    heard: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: Any) -> None:
        heard.append(number)
        signal.signal(signal.SIGINT, before)

    _outer.append(lambda: bool(heard))
    signal.signal(signal.SIGINT, remember)
    try:
        yield _outer[0]
    finally:
        _outer.clear()
        signal.signal(signal.SIGINT, before)


def stop_if(interrupted: bool) -> None:
    """Raise the deferred KeyboardInterrupt, at a point where it cannot be lost."""
    if interrupted:
        raise KeyboardInterrupt
