"""How tests compile: with few optimisations, in a fifth of the time, unless OPTIMISED is set, as `make test-all` does.

The environment is changed, so that processes which tests start compile as the tests do. Imported before JAX starts.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import jaxlib
import pytest

OPTIMISED = bool(os.environ.get("OPTIMISED"))
FLAGS = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # The programs of tests are small, and many: what several processes have in common compiles once.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
XLA_FLAG = "--xla_cpu_use_fusion_emitters=false"  # XLA's older emitters: the newer ones take most of the time


@cache
def known() -> bool:
    """Whether this XLA has the flag: an unknown flag would abort the process."""
    name = XLA_FLAG.strip("-").split("=")[0].encode()
    for path in Path(jaxlib.__file__).parent.glob("libjax*.so"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(name) >= 0:
                return True
    return False


def use_few_optimisations() -> None:
    """Unless OPTIMISED is set."""
    if not OPTIMISED:
        os.environ.update(FLAGS)
        flags = os.environ.get("XLA_FLAGS", "").split()
        if XLA_FLAG not in flags and known():
            os.environ["XLA_FLAGS"] = " ".join([*flags, XLA_FLAG])


def keep_bytecode() -> None:
    """Also where the environment forbids it, as containers do: else each process compiles hundreds of modules again."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def share_contexts() -> None:
    """Lower programs in one MLIR context of each thread, renewed at times so that what it keeps does not add up.

    JAX makes a context for each program, which takes 6 to 15 ms, more than all else of lowering a few operations; the
    tests compile some 70,000 programs.
    """
    from jax._src.interpreters import mlir

    kept = threading.local()
    inner = mlir.ModuleContext.__init__

    def in_kept_context(self: Any, *, context: Any = None, **options: Any) -> None:
        if context is None:
            uses = getattr(kept, "uses", 0)
            kept.uses = uses + 1
            if uses % 200 == 0:
                kept.context = mlir.make_ir_context()
            context = kept.context
        inner(self, context=context, **options)

    mlir.ModuleContext.__init__ = in_kept_context


def with_devices(count: int) -> str:
    """XLA_FLAGS of a process that compiles as this one does, for `count` CPU devices."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()


def all_optimisations() -> dict[str, str]:
    """The environment of a process that compiles as users do."""
    kept = {name: value for name, value in os.environ.items() if name not in FLAGS}
    flags = [flag for flag in kept.pop("XLA_FLAGS", "").split() if flag != XLA_FLAG]
    return kept | ({"XLA_FLAGS": " ".join(flags)} if flags else {})


def optimised(test: Any) -> Any:
    """Mark a test of properties of optimised programs: their bits, memory or work. `make test-all` runs it."""
    skip = pytest.mark.skipif(not OPTIMISED, reason="of optimised programs: OPTIMISED=1, as in `make test-all`")
    return pytest.mark.heavy(pytest.mark.optimised(skip(test)))
