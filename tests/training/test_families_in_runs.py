"""Whole runs of every family: adapters, killed and resumed; all parameters, with an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs
from test_resume import assert_same_records
from test_turn_runs import config_of

from jaxrl_llm.training import loop

VECTORS = runs.MODEL.parent
FAMILIES = sorted(file.parent.name for file in VECTORS.glob("*/config.json"))
pytestmark = pytest.mark.heavy


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(runs, "MODEL", VECTORS / request.param)
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    return str(request.param)


def test_adapters_and_completions_in_flight_resume_bit_by_bit(family: str, tmp_path: Path) -> None:
    """Completions go on over several steps, sampled with adapters of all projections that can have some; a run that was
    killed after the second step ends as the one that was not."""
    more: Any = {"segment_tokens": 3, "oversample": 1.5, "steps": 3, "checkpoint_every": 1, "keep_checkpoints": 9}
    if family in ("gemma3", "gemma4_moe"):  # so sure of each token that all completions of a group are the same
        more["temperature"] = 5.0
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        loop.train(runs.small_config(tmp_path, eval_size=0, top_p=1.0, lora_rank=2, **more))
    assert any(answer.tokens.size for step in taken for answer in step.waiting)
    lines = runs.finite_lines_of(tmp_path)
    assert lines[0]["mismatch"] < 3e-4
    assert max(line["grad_norm"] for line in lines) > 0
    assert_same_records(runs.resumed_copy(tmp_path, [3]), tmp_path / "run")


def test_an_agent_of_three_turns(family: str, tmp_path: Path) -> None:
    """Its conversations come back turn by turn, and the trainer sees them with the sampler's log-probabilities."""
    runs.train(config_of(tmp_path, "gigpo"))
    lines = runs.finite_lines_of(tmp_path)
    assert len(lines) == 2
    assert lines[0]["mismatch"] < 3e-4
    assert lines[0].get("rollout/failed_groups", 0) == 0
