"""Runs with rounded weights: the ratio before the first step is 1, and a resumed run ends as one that was not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.training import loop
from jaxrl_llm.training.folder.load_run import load_run

JET_RL: dict[str, Any] = {
    "dtype": "bfloat16", "activations": "float32", "weight_dtype": "int8", "same_rounding": True, "top_p": 1.0,
    "minibatches": 1,
}  # fmt: skip


def mismatches(folder: Path) -> list[float]:
    """|log-probability in the trainer - in the sampler| in each step, before its update."""
    return [line["mismatch"] for line in runs.lines_of(folder / "metrics.jsonl")]


@pytest.mark.heavy
def test_sampler_and_trainer_agree_and_the_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = runs.small_config(tmp_path, **JET_RL)
    runs.train(config)
    run = tmp_path / "run"
    assert max(mismatches(run)) < 1e-5
    started, ended = (runs.lines_of(run / "metrics.jsonl")[at] for at in (0, -1))
    assert started["loss"] != ended["loss"]
    # From the middle again.
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shutil.rmtree(other / "checkpoints" / "4")
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    loop.resume(str(other))
    runs.assert_equal_trees(runs.final_params(run), runs.final_params(other))
    assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(other / "metrics.jsonl")
    # Its weights are not rounded: in float32, more than 255 of each matrix's column.
    _, policy, params, _ = load_run(str(run))
    assert (policy.rounding, policy.activations) == ("int8", jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    column = np.asarray(params["layers"]["gate"][0, :, 0])
    steps = column / np.abs(column).max() * 127
    assert np.abs(steps - np.round(steps)).max() > 0.1


@pytest.mark.heavy
def test_products_of_rounded_factors_agree(tmp_path: Path) -> None:
    """But for tokens after an activation that fell on the other side of a step; the mean over a step's tokens."""
    found = {}
    for name, same in (("both", True), ("sampler", False)):
        changes = {**JET_RL, "weight_dtype": "float8_blocks", "same_rounding": same, "steps": 2, "eval_size": 0}
        (tmp_path / name).mkdir()
        runs.train(runs.small_config(tmp_path / name, **changes))
        found[name] = mismatches(tmp_path / name / "run")
    assert max(found["both"]) < 0.2 * min(found["sampler"]), found


@pytest.mark.heavy
def test_at_two_precisions_they_do_not_agree(tmp_path: Path) -> None:
    found = {}
    for name, changes in (
        ("int8 while sampling", {"weight_dtype": "int8"}),
        ("int8 while sampling, with adapters", {"weight_dtype": "int8", "lora_rank": 4}),
        ("float8 caches", {"cache_dtype": "float8"}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        runs.train(runs.small_config(folder, steps=1, eval_size=0, top_p=1.0, minibatches=1, **changes))
        found[name] = max(mismatches(folder / "run"))
    assert min(found.values()) > 1e-3, found
