"""Ctrl-C, remembered: an exception raised by a signal may arise inside a callback of JAX and be lost there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_outer: list[Callable[[], bool]] = []  # the one that listens; signals belong to the whole process


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, a first Ctrl-C is only remembered: the function that is given says whether one came.

    A second one raises KeyboardInterrupt, as ever. Inside another `interruptible` it is that one's function, so that
    a whole loop and the parts that it calls look at one flag. Outside the main thread it is always false.
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
    """KeyboardInterrupt where Ctrl-C was heard, raised where it cannot be lost."""
    if interrupted:
        raise KeyboardInterrupt
