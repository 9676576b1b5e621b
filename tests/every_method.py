"""Names for tests of every method: one of each family is tried by `make test`, the others by `make test-all`."""

from __future__ import annotations

import pytest

from jaxrl_llm import algorithms

FEW = {"grpo", *(family.__all__[0] for family in algorithms.FAMILIES)}
NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.heavy) for name in algorithms.names()]
every_method = pytest.mark.parametrize("name", NAMES)
