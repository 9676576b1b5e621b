"""Which parameters of a test `make test` tries; with the others it is heavy, and run by `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def few(values: Iterable[Any], light: Collection[Any], unpack: bool = False) -> list[Any]:
    """Parameters, of which all but those in `light` are heavy. unpack: each is a tuple of values."""

    def heavy(value: Any) -> Any:
        return pytest.param(*(value if unpack else (value,)), marks=pytest.mark.heavy)

    return [value if value in light else heavy(value) for value in values]


def share(values: Sequence[Any], which: str | None = None) -> list[Any]:
    """All values, or where METHODS_SHARE (or `which`) is "k/n", with 0 <= k < n, those at k, k + n, k + 2 n, ..."""
    which = os.environ.get("METHODS_SHARE") if which is None else which
    first, each = map(int, which.split("/")) if which else (0, 1)
    return list(values[first::each])
