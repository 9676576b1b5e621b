"""Tests of every method of the catalogue: `make test` tries a few that differ in kind, `make test-all` the others."""

from __future__ import annotations

import pytest
from heavy import few

from jaxrl_llm import algorithms

# Groups; a critic; memory of past batches; a trust region; no advantages.
FEW = ("grpo", "ppo", "epo", "clip_cov", "drpo_decoupled_reward")
# Of this scope, so that the tests of a module that concern one method follow each other and share its programs.
every_method = pytest.mark.parametrize("name", few(algorithms.names(), FEW), scope="module")
