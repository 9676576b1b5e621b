"""Runs whose programs wait for each other: samples in rounds, with solved problems as examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs
from test_resume import STEPS, assert_same_run

from jaxrl_llm.training import loop
from jaxrl_llm.utils.errors import InputError


def config_of(folder: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "algorithm": "xrpo", "hyperparameters": {"exploration": 1.0}, "steps": 2, "reward": "starts_even",
        "eval_size": 0, "top_p": 1.0, "minibatches": 1, "group_size": 5,
    }  # fmt: skip
    return runs.small_config(folder, **{**settings, **changes})


@pytest.mark.heavy
def test_xrpo_trains_by_name_with_any_number_of_slots(tmp_path: Path) -> None:
    """Half of the groups are tried again with examples in the second step; slots change nothing that is sampled."""
    found = {}
    for slots in (0, 3):
        taken: list[runs.Taken] = []
        folder = tmp_path / str(slots)
        folder.mkdir()
        with runs.watched(taken):
            runs.train(config_of(folder, slots=slots))
        lines = runs.lines_of(folder / "run" / "metrics.jsonl")
        assert len(lines) == 2
        assert all(np.isfinite(line["loss"]) and "rollout/failed_groups" not in line for line in lines)
        assert all(line["mismatch"] < 1e-5 for line in lines), "sampler and trainer agree, whatever the prompt"
        assert (lines[0]["rollout/guided"], lines[0]["curriculum/pool"] > 0) == (0.0, True)
        assert 0 < lines[1]["rollout/guided"] < 0.5
        assert lines[1]["off_prompt/mismatch"] > 1e-4
        assert any(line["grad_norm"] > 0 for line in lines)
        sizes = [np.bincount(np.asarray(one.scored.batch.group)).tolist() for one in taken]
        assert [sum(step) for step in sizes] == [20, 20]
        assert min(map(min, sizes)) >= 2
        assert max(map(max, sizes)) > 5, sizes
        found[slots] = [np.asarray(one.scored.batch.tokens) for one in taken]
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.heavy
def test_a_resumed_run_has_the_pool(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    runs.train(config_of(tmp_path, steps=STEPS, checkpoint_every=1, keep_checkpoints=9))
    copy = runs.resumed_copy(tmp_path, range(3, STEPS + 1))
    assert_same_run(copy, tmp_path / "run")


def test_rounds_need_all_groups_of_a_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"in_rounds\(half, 2\) wait for each other, but oversample and segment_tok"):
        loop.train(config_of(tmp_path, oversample=2.0))
    with pytest.raises(InputError, match=r"group_size is 2, but the rollout in_rounds\(half, 2\) needs at least 3"):
        loop.train(config_of(tmp_path, group_size=2))
