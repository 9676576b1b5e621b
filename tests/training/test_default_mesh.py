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
from jaxrl_llm.plan.choose_mesh import candidates, choose, memory_of, with_chosen_meshes
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.plan.sampling import abstract_mesh
from jaxrl_llm.plan.sampling_mesh import START, Devices, fastest, splits_of
from jaxrl_llm.plan.shapes import state_shapes
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.method import make_algorithm

CONFIGS = Path(__file__).parents[2] / "experiments" / "plan"
HALF = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
SLICES = HALF | {"micro_batches": 8}
# (model, chip, devices, hosts, settings) -> mesh, and the mesh to sample on where that is another
TABLE = [
    ("smollm2-135m", "v5e", 4, 1, SLICES, "data=4", ""),  # 3 key-value heads
    ("smollm2-135m", "v5p", 16, 4, {}, "data=16", ""),
    ("qwen3-8b", "h200", 8, 1, SLICES, "data=4,fsdp=2", "data=4,tensor=2"),
    ("qwen3-8b", "v5p", 16, 4, SLICES, "data=4,fsdp=4", "data=4,tensor=4"),
    ("qwen3-8b", "v5p", 16, 4, HALF | {"lora_rank": 16}, "data=8,fsdp=2", "data=4,tensor=4"),
    ("qwen3-8b", "v6e", 64, 16, HALF, "data=2,fsdp=32", "data=16,tensor=4"),
    ("qwen3-8b", "v5e", 256, 64, HALF, "data=8,fsdp=8,tensor=4", ""),  # prompts for 64 slices of rows
    ("llama-3.1-70b", "v5p", 64, 16, SLICES, "fsdp=32,tensor=2", "data=16,tensor=4"),
    ("qwen3-30b-a3b", "h100", 32, 4, HALF, "data=2,fsdp=16", "data=4,expert=2,tensor=4"),
    ("qwen3-30b-a3b", "v6e", 64, 16, HALF | {"lora_rank": 16}, "data=8,fsdp=8", "data=16,tensor=4"),
    ("qwen3-8b", "v5e", 4, 1, {}, "fsdp=4", "tensor=4"),  # does not fit, but no other mesh takes less
]


@cache
def model_of(name: str) -> ModelConfig:
    return config_of(str(CONFIGS / f"{name}.json"))


def config(**settings: Any) -> TrainConfig:
    long = {"prompts_per_step": 64, "group_size": 16, "max_prompt_tokens": 1024, "max_new_tokens": 1024}
    return TrainConfig(**long, **settings)


def sizes_in(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def least_by_hand(
    model: ModelConfig, settings: dict[str, Any], shards: dict[str, int], sampled: dict[str, int]
) -> float:
    """Bytes on a device of weights, moments and reference in shards, and of the sampler's weights, whole along data."""
    experts, rest = 0, 0
    for path, shape in parameter_shapes(model).items():
        of_experts = model.num_experts and path[-1] in ("gate", "up", "down")
        experts, rest = experts + of_experts * math.prod(shape), rest + (not of_experts) * math.prod(shape)

    def own(sizes: dict[str, int]) -> float:
        return (rest + experts / sizes.get("expert", 1)) / sizes.get("tensor", 1)

    item = 2 if settings else 4
    # Weights and their copy as the reference; two moments and, of weights in bfloat16, a master copy, in float32.
    kept = item if settings.get("lora_rank") else 2 * item + 8 + 4 * (item == 2)
    return own(shards) * kept / shards.get("fsdp", 1) + own(sampled) * item


@pytest.mark.parametrize(("name", "chip", "count", "hosts", "settings", "mesh", "sampled"), TABLE)
def test_real_models_on_real_chips(
    name: str, chip: str, count: int, hosts: int, settings: dict[str, Any], mesh: str, sampled: str
) -> None:
    asked, model, of_chip = config(**settings), model_of(name), (TPUS | GPUS)[chip]
    devices = Devices(count, hosts, of_chip.usable, chip=of_chip)
    found = choose(asked, model, make_algorithm(asked), devices)
    assert (found.mesh, found.sampling_mesh) == (mesh, sampled)
    shards, split = sizes_in(mesh), sizes_in(sampled or mesh)
    assert math.prod(shards.values()) == math.prod(split.values()) == count
    for sizes in (shards, split):
        assert count // hosts % (sizes.get("tensor", 1) * sizes.get("expert", 1)) == 0  # inside a host
    by_hand = least_by_hand(model, settings, shards, split)
    assert by_hand < found.bytes
    fits = found.bytes <= of_chip.usable
    assert ("chosen because a device then needs" in found.line) == fits
    assert fits or by_hand > of_chip.usable
    alone = choose(asked, model, make_algorithm(asked), dataclasses.replace(devices, chip=None))
    assert alone.sampling_mesh == "", "where no rates are known"


def seconds_of_steps(name: str, chip: str, devices: int, tensor: int, **settings: Any) -> float:
    """Of the decode steps of an iteration, by hand: what is read, and sent in two all-reduces of each layer."""
    model, rates, asked = model_of(name), TPUS[chip], config(dtype="bfloat16", **settings)
    D, h, n = model.hidden_size, model.head_dim, model.num_layers
    weights = 2 * sum(math.prod(shape) for shape in parameter_shapes(model).values())
    prompts, G = asked.prompts_per_step, asked.group_size
    caches = 2 * 2 * n * model.num_kv_heads * h * (prompts * 1024 + prompts * G * 1024)
    rows = prompts * G * tensor / devices
    sent = rows * 2 * n * 2 * D * 2 * (tensor - 1) / tensor
    starts = 2 * n * START * (tensor > 1)
    return 1024 * ((weights / tensor + caches / devices) / rates.bandwidth / 1e9 + sent / rates.links / 1e9 + starts)


def test_a_step_takes_as_long_as_it_reads_and_sends() -> None:
    asked, model = config(dtype="bfloat16", eval_size=0), model_of("qwen3-8b")
    shapes = state_shapes(asked, model, make_algorithm(asked))
    devices = Devices(16, 4, TPUS["v6e"].usable, chip=TPUS["v6e"], platform="tpu")
    splits = splits_of(asked, make_algorithm(asked), shapes, devices)
    own, *others = splits(abstract_mesh({"data": 1, "fsdp": 16}))
    assert [dict(one.mesh.shape) for one in (own, *others)] == [
        {"data": 16, "tensor": 1}, {"data": 8, "tensor": 2}, {"data": 4, "tensor": 4},
    ]  # fmt: skip
    for one in (own, *others):
        by_hand = seconds_of_steps("qwen3-8b", "v6e", 16, one.mesh.shape["tensor"])
        assert one.seconds == pytest.approx(by_hand, rel=0.02)
    memory = 2**50
    assert fastest([own, *others], 0, memory) is others[1]
    assert fastest([own, others[0]._replace(seconds=0.95 * own.seconds)], 0, memory) is own, "a tie"
    least = min((own, *others), key=lambda one: one.sampling.peak)
    assert fastest([own, *others], 0, 0) is least, "none fits"
    assert fastest([own, *others], memory - least.sampling.peak, memory) is least, "the others do not fit"


def test_a_plan_takes_the_mesh_that_a_run_would() -> None:
    asked = config(model=str(CONFIGS / "qwen3-8b.json"), **SLICES)
    devices = [SimpleNamespace(process_index=number // 4) for number in range(16)]
    topology = Topology(TPUS["v5p"], devices, "tpu")
    found = with_chosen_meshes(asked, topology)
    assert (found.mesh, found.sampling_mesh) == ("data=4,fsdp=4", "data=4,tensor=4"), "as in TABLE"
    named = dataclasses.replace(asked, mesh="fsdp=16")
    assert with_chosen_meshes(named, topology) == dataclasses.replace(named, sampling_mesh="data=4,tensor=4")
    both = dataclasses.replace(named, sampling_mesh="data=8,tensor=2")
    assert with_chosen_meshes(both, topology) == both
    assert with_chosen_meshes(dataclasses.replace(asked, sampling_mesh="data=8,tensor=2"), topology).sampling_mesh == (
        "data=8,tensor=2"
    )
    assert with_chosen_meshes(asked, Topology(TPUS["v5p"], devices, "cpu")) == asked


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
    begin = f"from jaxrl_llm.cli.program import main\nmain({['train', *runs.as_arguments(asked)]!r})"
    process = runs.start("train", "--resume", asked.output, code=begin, XLA_FLAGS=compiling.with_devices(4))
    said = process.communicate()[0]
    assert "mesh data=4, chosen because these devices have no memory of their own; --mesh sets another" in said
    assert "mesh data=4, as before; --mesh sets another" in said
    assert json.loads((Path(asked.output) / "config.json").read_text())["chosen_mesh"] == "data=4"
    assert json.loads((Path(asked.output) / "summary.json").read_text())["mesh"] == "data=4"
