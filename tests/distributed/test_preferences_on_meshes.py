"""Supervised, DPO and reward-model runs on two hosts, sharded and with LoRA, against the same run on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.benchmarks import hosts

PAIRS = [
    {"prompt": f"number {i:02d}:", "chosen": f" {i} {i % 3}", "rejected": " none" * (1 + i % 2)} for i in range(16)
]
CASES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft", "group_size": 1, "hyperparameters": {"column": "chosen"}, "mesh": "fsdp=4"},
    "dpo": {"algorithm": "dpo", "mesh": "data=2,fsdp=2"},
    "dpo, LoRA": {"algorithm": "dpo", "lora_rank": 4, "mesh": "fsdp=4"},
    "reward_model": {"algorithm": "reward_model", "mesh": "data=2,fsdp=2"},
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_two_hosts_learn_what_one_does(name: str, tmp_path: Path) -> None:
    hosts.make_inputs(tmp_path)
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    options = {
        "prompts": str(rows), "rewards": ["given"], "same_task": "row", "group_size": 2, "steps": 2, "eval_size": 4,
        **CASES[name],
    }  # fmt: skip
    one = hosts.run(tmp_path, "one", 1, options | {"mesh": ""})
    two = hosts.run(tmp_path, "two", 2, options)
    for key, wanted in one["params"].items():
        np.testing.assert_allclose(two["params"][key], wanted, rtol=1e-4, atol=1e-5, err_msg=key)
    for line, other in zip(one["metrics"], two["metrics"], strict=True):
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-4, abs=1e-5)
