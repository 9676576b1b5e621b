"""Runs with speculation sample what runs without do, and resume bit by bit, with the drafts of earlier epochs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.training import loop

# 16 completions of 12 tokens on 3 slots: the last one decodes alone. 12 prompts, 4 a step: two epochs in 6 steps.
UNEVEN: dict[str, Any] = {"steps": 6, "slots": 3, "max_new_tokens": 12, "eval_size": 0, "minibatches": 1}


@pytest.mark.heavy
def test_the_same_tokens_and_the_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {}
    for name, width in (("plain", 0), ("fast", 3)):
        (tmp_path / name).mkdir()
        runs.train(runs.small_config(tmp_path / name, speculative_tokens=width, **UNEVEN))
        folders[name] = tmp_path / name / "run"
    texts = [
        [(line["step"], line["tokens"]) for line in runs.lines_of(folder / "completions.jsonl")]
        for folder in folders.values()
    ]
    assert len(texts[0]) > 6
    assert texts[0] == texts[1]
    plain, fast = (runs.final_params(folder) for folder in folders.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), plain, fast)
    acceptance = [line.get("rollout/draft_acceptance") for line in runs.lines_of(folders["fast"] / "metrics.jsonl")]
    assert any(share is not None for share in acceptance)
    other = tmp_path / "other"
    shutil.copytree(folders["fast"], other)
    shutil.rmtree(other / "checkpoints" / "6")
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    loop.resume(str(other))
    runs.assert_equal_trees(runs.final_params(folders["fast"]), runs.final_params(other))
    assert runs.reproducible(folders["fast"] / "metrics.jsonl") == runs.reproducible(other / "metrics.jsonl")
