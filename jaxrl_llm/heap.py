"""Limit the freed memory that glibc's allocator retains. With other C libraries nothing happens."""

from __future__ import annotations

import contextlib
import ctypes
import os

import jax

_ARENAS = -8  # M_ARENA_MAX of mallopt
_listening = False


def limit_retained() -> None:
    """Make the allocator retain little freed memory from now on; idempotent.

    Threads started later share one arena, so that one can reuse what another frees (unless MALLOC_ARENA_MAX or
    GLIBC_TUNABLES is set), and memory freed by a compilation is returned before the program runs. Together this lowers
    the peak memory of an update of SmolLM2 by 5 to 6 %, and keeps it from growing with the iterations.
    """
    global _listening
    if not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"} & set(os.environ):
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_ARENAS, 1)
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_heard)
        _listening = True


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        trim()


def trim() -> None:
    """Return the heap's free pages to the system.

    Called between rollout and update; otherwise memory freed by the rollout would add to the update's peak.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
