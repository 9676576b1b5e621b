"""Which parameters of a test `make test` tries; with the others it is heavy, and run by `make test-all`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], light: Collection[Any], unpack: bool = False) -> list[Any]:
    """Parameters, of which all but those in `light` are heavy. unpack: each is a tuple of values."""

    def heavy(value: Any) -> Any:
        return pytest.param(*(value if unpack else (value,)), marks=pytest.mark.heavy)

    return [value if value in light else heavy(value) for value in values]


def is_in_share(name: str, which: str | None = None) -> bool:
    """Whether HEAVY_SHARE (or `which`), "k/n" with 0 <= k < n, has a test: each is in one of n shares, by its name."""
    which = os.environ.get("HEAVY_SHARE") if which is None else which
    if not which:
        return True
    number, count = map(int, which.split("/"))
    return zlib.crc32(name.encode()) % count == number
