"""The mesh of a run that names none: real models on real chips, what it is remembered as, and what the console says."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compiling
import pytest
import tiny_runs as runs

from jaxrl_llm.distributed.chips import GPUS, TPUS, Topology
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters import parameter_shapes
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.default_mesh import Devices, candidates, choose, memory_of, planned
from jaxrl_llm.runs.method import make_algorithm
from jaxrl_llm.runs.plan_shapes import config_of
from jaxrl_llm.runs.run_folder import RunFolder

CONFIGS = Path(__file__).parents[2] / "experiments" / "plan"
HALF = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
SLICES = HALF | {"micro_batches": 8}
# (model, chip, devices, hosts, settings) -> mesh
TABLE = [
    ("smollm2-135m", "v5e", 4, 1, SLICES, "data=4"),
    ("smollm2-135m", "v5p", 16, 4, {}, "data=16"),
    ("qwen3-8b", "h200", 8, 1, SLICES, "data=4,fsdp=2"),
    ("qwen3-8b", "v5p", 16, 4, SLICES, "data=4,fsdp=4"),
    ("qwen3-8b", "v5p", 16, 4, HALF | {"lora_rank": 16}, "data=8,fsdp=2"),
    ("qwen3-8b", "v6e", 64, 16, HALF, "data=2,fsdp=32"),
    ("qwen3-8b", "v5e", 256, 64, HALF, "data=2,fsdp=64,tensor=2"),
    ("llama-3.1-70b", "v5p", 64, 16, SLICES, "data=2,fsdp=8,tensor=4"),
    ("qwen3-30b-a3b", "h100", 32, 4, HALF, "data=2,fsdp=8,expert=2"),
    ("qwen3-30b-a3b", "v6e", 64, 16, HALF | {"lora_rank": 16}, "data=8,fsdp=2,expert=4"),
    ("qwen3-8b", "v5e", 4, 1, {}, "fsdp=4"),  # does not fit, but no other mesh takes less
]


@cache
def model_of(name: str) -> ModelConfig:
    return config_of(str(CONFIGS / f"{name}.json"))


def config(**settings: Any) -> TrainConfig:
    long = {"prompts_per_step": 64, "group_size": 16, "max_prompt_tokens": 1024, "max_new_tokens": 1024}
    return TrainConfig(**long, **settings)


def least_by_hand(model: ModelConfig, settings: dict[str, Any], shards: dict[str, int]) -> float:
    """Bytes on a device of weights, moments and reference in shards, and of the sampler's weights, whole along data."""
    experts, rest = 0, 0
    for path, shape in parameter_shapes(model).items():
        of_experts = model.num_experts and path[-1] in ("gate", "up", "down")
        experts, rest = experts + of_experts * math.prod(shape), rest + (not of_experts) * math.prod(shape)
    tensor, expert = shards.get("tensor", 1), shards.get("expert", 1)
    own, item = rest / tensor + experts / tensor / expert, 2 if settings else 4
    # Weights and their copy as the reference; two moments and, of weights in bfloat16, a master copy, in float32.
    kept = item if settings.get("lora_rank") else 2 * item + 8 + 4 * (item == 2)
    return own * (kept / shards.get("fsdp", 1) + item)


@pytest.mark.parametrize(("name", "chip", "count", "hosts", "settings", "mesh"), TABLE)
def test_real_models_on_real_chips(
    name: str, chip: str, count: int, hosts: int, settings: dict[str, Any], mesh: str
) -> None:
    asked, model, memory = config(**settings), model_of(name), (TPUS | GPUS)[chip].usable
    found = choose(asked, model, make_algorithm(asked), Devices(count, hosts, memory))
    assert found.mesh == mesh
    shards = {part.split("=")[0]: int(part.split("=")[1]) for part in mesh.split(",")}
    assert math.prod(shards.values()) == count
    assert count // hosts % (shards.get("tensor", 1) * shards.get("expert", 1)) == 0  # inside a host
    by_hand = least_by_hand(model, settings, shards)
    assert by_hand < found.bytes
    fits = found.bytes <= memory
    assert ("chosen because a device then needs" in found.line) == fits
    assert fits or by_hand > memory
    if "tensor" in shards or "expert" in shards:  # "fsdp" leaves the sampler's weights whole
        assert least_by_hand(model, settings, {"fsdp": count}) > 0.9 * memory


def test_a_plan_takes_the_mesh_that_a_run_would() -> None:
    asked = config(model=str(CONFIGS / "qwen3-8b.json"), **SLICES)
    devices = [SimpleNamespace(process_index=number // 4) for number in range(16)]
    assert planned(asked, Topology(TPUS["v5p"], devices, "tpu")).mesh == "data=4,fsdp=4", "as in TABLE"
    named = dataclasses.replace(asked, mesh="fsdp=16")
    assert planned(named, Topology(TPUS["v5p"], devices, "tpu")) == named
    assert planned(asked, Topology(TPUS["v5p"], devices, "cpu")) == asked


def test_the_first_candidates_communicate_least() -> None:
    def sizes(name: str, devices: Devices) -> list[dict[str, int]]:
        found = [dict(mesh.shape) for mesh in candidates(model_of(name), devices)]
        return [{key: size for key, size in one.items() if size > 1} for one in found]

    assert sizes("qwen3-8b", Devices(8, 2))[:5] == [
        {"data": 8}, {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 4}, {"fsdp": 8}, {"data": 4, "tensor": 2},
    ]  # fmt: skip
    assert all(one.get("tensor", 1) <= 4 for one in sizes("qwen3-8b", Devices(8, 2)))
    assert not any("tensor" in one for one in sizes("smollm2-135m", Devices(4)))  # 3 key-value heads
    # Several slices: their network is between them along data or fsdp.
    assert all(one.get("data", 1) % 2 == 0 or one["fsdp"] % 2 == 0 for one in sizes("qwen3-8b", Devices(8, 2, 0, 2)))


def test_rows_that_no_mesh_splits_are_left_to_the_check_of_rows() -> None:
    asked = dataclasses.replace(config(**HALF), prompts_per_step=1, group_size=3)
    assert choose(asked, model_of("smollm2-135m"), make_algorithm(asked), Devices(4, 1, 2**40)).mesh == "data=4"


def test_memory_is_what_the_device_says_or_its_kind() -> None:
    def device(kind: str, platform: str = "tpu", **stats: int) -> Any:
        return SimpleNamespace(device_kind=kind, platform=platform, memory_stats=lambda: stats or None)

    assert memory_of([device("TPU v5 lite", bytes_limit=5), device("TPU v5 lite", bytes_limit=4)]) == 4
    assert memory_of([device("TPU v5 lite")]) == TPUS["v5e"].usable
    assert memory_of([device("NVIDIA H100 80GB HBM3", "gpu")]) == GPUS["h100"].usable
    assert memory_of([device("cpu", "cpu", bytes_limit=4)]) == 0
    assert memory_of([device("an unknown one")]) == 0


def test_a_folder_remembers_what_was_chosen(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create({"prompts_per_step": 1, "mesh": ""}, "fsdp=4")
    assert folder.recorded_mesh() == "fsdp=4"
    assert folder.read_config().mesh == ""
    given = RunFolder(tmp_path / "given")
    given.create({"prompts_per_step": 1, "mesh": "tensor=2"}, "tensor=2")
    assert given.recorded_mesh() == "tensor=2"
    assert "chosen_mesh" not in json.loads(given.config.read_text())


@pytest.mark.heavy
def test_a_run_on_four_devices_says_its_mesh_and_keeps_it(tmp_path: Path) -> None:
    asked = runs.small_config(tmp_path, steps=1, minibatches=1, top_p=1.0, eval_size=0, algorithm="dr_grpo")
    begin = f"from jaxrl_llm.cli import main\nmain({['train', *runs.as_arguments(asked)]!r})"
    process = runs.start("train", "--resume", asked.output, code=begin, XLA_FLAGS=compiling.with_devices(4))
    said = process.communicate()[0]
    assert "mesh data=4, chosen because these devices have no memory of their own; --mesh sets another" in said
    assert "mesh data=4, as before; --mesh sets another" in said
    assert json.loads((Path(asked.output) / "config.json").read_text())["chosen_mesh"] == "data=4"
    assert json.loads((Path(asked.output) / "summary.json").read_text())["mesh"] == "data=4"
