"""Which parameters of a test `make test` tries; with the others it is heavy, and run by `make test-all`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], light: Collection[Any]) -> list[Any]:
    """Parameters, of which all but those in `light` are heavy."""
    return [value if value in light else pytest.param(value, marks=pytest.mark.heavy) for value in values]
