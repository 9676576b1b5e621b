"""Which tests are heavy: left out by `make test`, and run by `make test-all`.

Those that say so (`few`, @pytest.mark.heavy), and those of slow.txt, which took more than LIMIT CPU seconds. To measure
them anew, with all programs compiled, in an hour or so:

    CPU_SECONDS=/tmp/seconds.txt JAX_COMPILATION_CACHE_DIR=/tmp/new make test
    python tests/heavy.py /tmp/seconds.txt

which adds what has become slow; a line that is taken out brings a test back.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LIMIT = 2.0  # CPU seconds, of a test and of the processes that it started
SLOW = Path(__file__).with_name("slow.txt")  # names of tests, one a line
KEPT = (  # what users meet first is always tried
    "tests/docs", "tests/algorithms/test_grpo.py", "tests/models/test_parity.py", "tests/sampling/test_engine.py",
    "tests/sampling/test_sampler.py", "tests/training/test_loop.py", "tests/training/test_resume.py",
    *(f"tests/test_{name}.py" for name in ("api", "cli", "docs", "examples", "first_commands")),
)  # fmt: skip


def few(values: Iterable[Any], light: Collection[Any], unpack: bool = False) -> list[Any]:
    """Parameters, of which all but those in `light` are heavy. unpack: each is a tuple of values."""

    def heavy(value: Any) -> Any:
        return pytest.param(*(value if unpack else (value,)), marks=pytest.mark.heavy)

    return [value if value in light else heavy(value) for value in values]


@cache
def slow() -> frozenset[str]:
    """The names of slow tests."""
    return frozenset(SLOW.read_text().splitlines())


@contextmanager
def measured(name: str) -> Iterator[None]:
    """Add a line with the CPU seconds of a test to the file that CPU_SECONDS names, if it does."""
    before = _seconds()
    yield
    if file := os.environ.get("CPU_SECONDS"):
        with open(file, "a") as out:
            out.write(f"{_seconds() - before:.2f}\t{name}\n")


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def add_slow(file: Path) -> None:
    """Add the tests that took more than LIMIT to slow.txt."""
    lines = (line.split("\t", 1) for line in file.read_text().splitlines())
    found = {name for seconds, name in lines if float(seconds) > LIMIT and not name.startswith(KEPT)}
    SLOW.write_text("".join(f"{name}\n" for name in sorted(slow() | found)))


def is_in_share(name: str, which: str | None = None) -> bool:
    """Whether HEAVY_SHARE (or `which`), "k/n" with 0 <= k < n, has a test: each is in one of n shares, by its name."""
    which = os.environ.get("HEAVY_SHARE") if which is None else which
    if not which:
        return True
    number, count = map(int, which.split("/"))
    return zlib.crc32(name.encode()) % count == number


if __name__ == "__main__":
    add_slow(Path(sys.argv[1]))
