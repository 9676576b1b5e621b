"""The persistent compilation cache, on by default, and a count of compilations."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_seconds: list[float] = []
_listening = False


def default_cache_folder() -> Path:
    """The folder of the compilation cache, unless JAX is configured with another."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxrl_llm" / "xla"


def use_compile_cache() -> None:
    """Enable the compilation cache, so that later processes need not compile the same programs.

    A cache folder that is already configured (`jax_compilation_cache_dir`) is kept.
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 (JAX defines it dynamically)
        jax.config.update("jax_compilation_cache_dir", str(default_cache_folder()))


def count_compiles() -> None:
    """Start counting compilations in this process; idempotent."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_heard)
        _listening = True


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _seconds.append(duration_secs)


def compiles() -> tuple[int, float]:
    """The number of programs compiled, or fetched from the cache, since `count_compiles`, and the seconds it took."""
    return len(_seconds), sum(_seconds)
