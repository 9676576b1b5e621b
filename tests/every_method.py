"""Tests of every method of the catalogue: `make test` tries one of each family, `make test-all` the others."""

from __future__ import annotations

import pytest
from heavy import few

from jaxrl_llm import algorithms

FEW = {"grpo", *(family.__all__[0] for family in algorithms.FAMILIES)}
every_method = pytest.mark.parametrize("name", few(algorithms.names(), FEW))
