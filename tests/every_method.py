"""Tests of every method of the catalogue: `make test` tries a few that differ in kind, `make test-all` the others."""

from __future__ import annotations

import pytest
from heavy import few

from jaxrl_llm import algorithms

# Groups; a critic; whole sequences; memory of past batches; sets; no advantages; a trust region; selected groups.
FEW = ("grpo", "ppo", "gspo", "epo", "passk_grpo", "drpo_decoupled_reward", "clip_cov", "brpo")
every_method = pytest.mark.parametrize("name", few(algorithms.names(), FEW))
