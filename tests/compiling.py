"""How tests compile: with few optimisations, in a fifth of the time, unless OPTIMISED is set, as `make test-all` does.

The environment is changed, so that processes which tests start compile as the tests do. Imported before JAX starts.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

OPTIMISED = bool(os.environ.get("OPTIMISED"))
FLAGS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
XLA_FLAG = "--xla_cpu_use_fusion_emitters=false"  # XLA's older emitters: the newer ones take most of the time


def use_few_optimisations() -> None:
    """Unless OPTIMISED is set."""
    if not OPTIMISED:
        os.environ.update(FLAGS)
        os.environ["XLA_FLAGS"] = with_devices(None)


def with_devices(count: int | None) -> str:
    """XLA_FLAGS of this process, with `count` CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    more = [] if OPTIMISED else [XLA_FLAG]
    more += [f"--xla_force_host_platform_device_count={count}"] if count else []
    return " ".join([*flags, *(flag for flag in more if flag not in flags)])


def all_optimisations() -> dict[str, str]:
    """The environment of a process that compiles as users do."""
    kept = {name: value for name, value in os.environ.items() if name not in FLAGS}
    flags = [flag for flag in kept.pop("XLA_FLAGS", "").split() if flag != XLA_FLAG]
    return kept | ({"XLA_FLAGS": " ".join(flags)} if flags else {})


def optimised(test: Any) -> Any:
    """Mark a test of what optimised programs are: their bits, memory or work. It is run by `make test-all`."""
    skip = pytest.mark.skipif(not OPTIMISED, reason="of optimised programs: OPTIMISED=1, as in `make test-all`")
    return pytest.mark.heavy(skip(test))
