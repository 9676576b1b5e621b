"""Whole runs on meshes: the same tokens and parameters as on one device, and a share of the state on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.benchmarks.meshes import compare, make_inputs, run
from experiments.launch import local
from jaxrl_llm.training.folder.load_run import load_run

CONTINUE = """
import json, sys
from pathlib import Path
sys.path[:0] = {path!r}
from jaxrl_llm.training import loop
from jaxrl_llm.cli.program import main
loop.write_report = lambda folder: folder
sys.exit(main(sys.argv[1:]))
"""


def assert_in_shards(found: dict[str, Any], one: dict[str, Any], shards: int) -> None:
    """shards: of a matrix. Norms and counters are not in shards; "tensor" does not divide the embedding's 257 tokens.

    A later batch may be packed into another size: the forward pass and the update compile again, and the preparation
    too where its rows are longer.
    """
    assert one["bytes"] / shards <= found["bytes"] < 1.2 * one["bytes"] / shards
    assert found["compiles"][-1] - found["compiles"][0] in (0, 2, 3)


def tokens_of(run: Path) -> list[tuple[int, int, list[str]]]:
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    return [(row["step"], row["prompt_id"], row["tokens"]) for row in rows]


@pytest.mark.heavy
def test_three_steps_on_four_devices_and_one_on_two_are_four_on_one(tmp_path: Path) -> None:
    """With the same prompts, samples and parameters."""
    make_inputs(tmp_path)
    one, found = run(tmp_path, "", 1, 4, {}), run(tmp_path, "fsdp=2,tensor=2", 4, 3, {})
    assert_in_shards(found, one, 4)
    folder = tmp_path / "fsdp=2,tensor=2"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "steps": 4}))
    environment = {**os.environ, **local.environment("cpu", 0, 2, os.environ.get("XLA_FLAGS", ""))}
    code = CONTINUE.format(path=sys.path)
    command = [sys.executable, "-c", code, "train", "--resume", str(folder), "--mesh", "fsdp=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 3" in done.stdout
    assert "mesh was 'fsdp=2,tensor=2', and is now 'fsdp=2'" in done.stdout
    assert tokens_of(folder) == tokens_of(tmp_path / "one")
    _, _, params, _ = load_run(str(folder))
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        assert np.abs(np.asarray(x) - one["params"][jax.tree_util.keystr(path)]).max() < 1e-5


@pytest.mark.heavy
def test_a_run_with_a_critic_on_four_devices_is_that_on_one(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    one, found = (run(tmp_path, *on, 3, {"algorithm": "ppo"}) for on in (("", 1), ("data=2,fsdp=-1", 4)))
    same, apart = compare(found, one)
    assert same
    assert apart < 1e-5
    assert_in_shards(found, one, 2)


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "mesh", "length"), [("qwen3_moe", "expert=4", 8), ("llama", "sequence=4", 40)])
def test_a_run_on_experts_or_long_rows_is_that_on_one(model: str, mesh: str, length: int, tmp_path: Path) -> None:
    make_inputs(tmp_path, model)
    one, found = (run(tmp_path, *on, 3, {"max_new_tokens": length}) for on in (("", 1), (mesh, 4)))
    same, apart = compare(found, one)
    assert same
    assert apart < 1e-5
