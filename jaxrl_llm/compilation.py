"""The compile cache, on by default, and a count of what was compiled."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_seconds: list[float] = []
_listening = False


def default_cache_folder() -> Path:
    """Where compiled programs are kept between processes unless JAX is configured otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxrl_llm" / "xla"


def use_compile_cache() -> None:
    """Keep compiled programs on disk, so that the next process starts at once.

    A cache folder that is already configured (`jax_compilation_cache_dir`) is left as it is.
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 (the name is made at run time)
        jax.config.update("jax_compilation_cache_dir", str(default_cache_folder()))


def count_compiles() -> None:
    """Start counting compilations in this process; calling it again changes nothing."""
    global _listening
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_heard)
        _listening = True


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _seconds.append(duration_secs)


def compiles() -> tuple[int, float]:
    """How many programs were compiled, or fetched from the cache, since `count_compiles`, and their seconds."""
    return len(_seconds), sum(_seconds)
