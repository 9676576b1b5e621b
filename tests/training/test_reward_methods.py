"""Runs, by name, of methods that read more of their rewards than a number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.algorithms import get

REWARDS = {
    "brain": ("number_match",), "carl_multiplicative_reward": ("number_match",), "open_rs": ("number_match",),
    "p3o_pairwise": ("number_match",), "srpo_self_referential": ("distances(number_match)",),
    "subpo": ("coverage(items)",), "ttrl": ("number_match",), "polychromic": ("exact_match",),
    "verpo": ("FILE:checks",), "degrpo": ("by_mode(number_match)",), "trpa": ("tagged_levels",),
    "c_morl": ("number_match", "exact_match"), "ui_r1": ("answer_tags", "gui_kind", "gui_click"),
    "gui_r1": ("gui_action", "gui_format"), "visual_rft": ("box_overlap", "box_confidence", "box_format"),
    "barfi": ("number_match", "exact_match"), "fgaif": ("coverage(items)",),
}  # fmt: skip
OWN = """
def checks(completions, completion_ids):
    return [{"reward": 0.0, "tests": [ids[0] % 2, ids[-1] % 3 == 0]} for ids in completion_ids]


checks.provides = {"tests"}
"""


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(REWARDS))
def test_it_trains_by_name(name: str, tmp_path: Path) -> None:
    """Two steps with the rewards of the library, with nothing left out but what is no part of rewards."""
    (tmp_path / "own.py").write_text(OWN)
    rewards = tuple(one.replace("FILE", str(tmp_path / "own.py")) for one in REWARDS[name])
    screen = {"action": {"action": "click", "point": [9, 9]}, "boxes": [[0, 0, 9, 9]]}
    lines = [{"prompt": f"number {i:02d}:", "answer": str(i), "items": ["e", "t", "a"], **screen} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = runs.small_config(
        tmp_path, algorithm=name, rewards=rewards, steps=2, minibatches=1, eval_every=0,
        prompts=str(tmp_path / "rows.jsonl"), checkpoint_every=2,
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == len(taken) == 2
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert set(get(name).needs & {*REWARDS[name]}) <= set(taken[0].scored.batch.rewards or {})
    for need in get(name).needs & {"answer_key", "tests", "distance", "spans"}:
        batch = taken[0].scored.batch
        assert (batch.token_rewards if need == "spans" else (batch.info or {})[need]) is not None
