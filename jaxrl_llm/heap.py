"""Memory that the C library keeps of what was freed. It is glibc's; with another one nothing happens."""

from __future__ import annotations

import contextlib
import ctypes
import os

_ARENAS = -8  # M_ARENA_MAX of mallopt


def share() -> None:
    """Let threads that start from now on take memory from one heap, and not each from its own.

    What one thread frees another then can take, and `give_back` finds it: an update of SmolLM2 peaks 2 to 3 % lower,
    and does not grow by the iteration. Where MALLOC_ARENA_MAX or GLIBC_TUNABLES is set, that counts.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_ARENAS, 1)


def give_back() -> None:
    """Return the heap's free pages to the system.

    Between a rollout and an update the free parts of the one would stand beside the buffers of the other.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
