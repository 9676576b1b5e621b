"""Whole runs on meshes: the same tokens and parameters as on one device, and a share of the state on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.benchmarks.meshes import compare, make_inputs, run


@pytest.mark.heavy
@pytest.mark.parametrize(("mesh", "options"), [("fsdp=2,tensor=2", {}), ("data=2,fsdp=-1", {"algorithm": "ppo"})])
def test_a_run_on_four_devices_is_that_on_one(mesh: str, options: dict[str, str], tmp_path: Path) -> None:
    make_inputs(tmp_path)
    one, found = run(tmp_path, "", 1, 3, options), run(tmp_path, mesh, 4, 3, options)
    same, apart = compare(found, one)
    assert same
    assert apart < 1e-5
    # Matrices are in shards, norms and counters are not; "tensor" does not divide the embedding's 257 tokens.
    shards = 2 if "data=2" in mesh else 4
    assert one["bytes"] / shards <= found["bytes"] < 1.2 * one["bytes"] / shards
    # A later batch may be packed into another size: the forward pass, the preparation and the update.
    assert found["compiles"][-1] - found["compiles"][0] in (0, 3)


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "mesh", "length"), [("qwen3_moe", "expert=4", 8), ("llama", "sequence=4", 40)])
def test_a_run_on_experts_or_long_rows_is_that_on_one(model: str, mesh: str, length: int, tmp_path: Path) -> None:
    make_inputs(tmp_path, model)
    one, found = (run(tmp_path, *on, 3, {"max_new_tokens": length}) for on in (("", 1), (mesh, 4)))
    same, apart = compare(found, one)
    assert same
    assert apart < 1e-5
