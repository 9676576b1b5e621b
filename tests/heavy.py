"""Which parameters of a test `make test` tries; with the others it is heavy, and run by `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], light: Collection[Any], unpack: bool = False) -> list[Any]:
    """Parameters, of which all but those in `light` are heavy. unpack: each is a tuple of values."""

    def heavy(value: Any) -> Any:
        return pytest.param(*(value if unpack else (value,)), marks=pytest.mark.heavy)

    return [value if value in light else heavy(value) for value in values]
