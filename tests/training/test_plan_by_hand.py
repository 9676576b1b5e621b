"""What a plan says is held on each device, against arithmetic on the models' config.json; meshes of the search."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import pytest

from jaxrl_llm.distributed.chips import Chip, Topology, topology_of
from jaxrl_llm.plan import search as plan_search
from jaxrl_llm.plan.estimate import COPY, held_bytes
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.plan.plan import estimated_plan
from jaxrl_llm.plan.sampling import abstract_mesh, weight_bytes
from jaxrl_llm.plan.search import applied, candidates
from jaxrl_llm.plan.shapes import state_shapes
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm

CONFIGS = Path(__file__).parents[2] / "experiments" / "plan"
with mock.patch.object(sys, "path", [str(CONFIGS), *sys.path]):
    from by_hand import COUNTERS, by_hand

MODELS = ("smollm2-135m", "qwen3-8b", "llama-3.1-70b", "qwen3-30b-a3b")
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"param_dtype": "bfloat16", "optimizer.moments": "bfloat16"},
    {"optimizer.moments": "factored"},
    {"param_dtype": "bfloat16", "optimizer.moments": "factored"},
    {"dtype": "bfloat16", "lora_rank": 16},
)
MESHES: tuple[dict[str, int], ...] = (
    {"data": 4},
    {"data": 1, "fsdp": 4, "tensor": 4},
    {"data": 2, "fsdp": 8, "tensor": 3},
    {"data": 1, "fsdp": 4, "expert": 4, "tensor": 2},
)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes) or "given")
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_plain_arithmetic(name: str, changes: dict[str, Any]) -> None:
    config = applied(TrainConfig(model=str(CONFIGS / f"{name}.json")), changes)
    shapes = state_shapes(config, config_of(config.model), make_algorithm(config))
    for mesh in MESHES:
        found, sure = held_bytes(shapes, abstract_mesh(mesh)), by_hand(CONFIGS / f"{name}.json", changes, mesh)
        assert (found.parameters, found.frozen) == (sure.parameters, sure.frozen), mesh
        assert 0 <= found.optimiser - sure.optimiser <= COUNTERS, mesh


class TestAxes:
    def meshes(self, name: str, **changes: Any) -> set[str]:
        devices = [SimpleNamespace(process_index=0)] * 8
        topology = Topology(Chip("toy", 400.0, 900, 1600, 400), devices, "tpu")
        settings: dict[str, Any] = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 256, "eval_size": 0}
        config = TrainConfig(model=str(CONFIGS / f"{name}.json"), dtype="bfloat16", **settings | changes)
        found = candidates(config, config_of(config.model), make_algorithm(config), topology)
        return {one.config.mesh for _, one in zip(range(60), found, strict=False)}

    def test_experts_are_split_for_mixtures(self) -> None:
        assert any("expert=" in mesh for mesh in self.meshes("qwen3-30b-a3b"))
        assert not any("expert=" in mesh for mesh in self.meshes("qwen3-8b"))

    def test_sequences_are_split_where_they_are_long(self) -> None:
        assert any("sequence=" in mesh for mesh in self.meshes("qwen3-8b", max_new_tokens=8192))
        assert not any("sequence=" in mesh for mesh in self.meshes("qwen3-8b"))


def test_experts_are_split_while_they_sample() -> None:
    config = TrainConfig(model=str(CONFIGS / "qwen3-30b-a3b.json"), dtype="bfloat16")
    shapes = state_shapes(config, config_of(config.model), make_algorithm(config))
    whole, quarter = (
        weight_bytes(shapes, abstract_mesh({"data": 4 // expert, "expert": expert, "tensor": 4})) for expert in (1, 4)
    )
    assert 3 < whole / quarter < 4


def test_a_compiler_that_fails_leaves_an_estimate() -> None:
    """As libtpu's does for some programs of several slices."""
    config = TrainConfig(model=str(CONFIGS / "smollm2-135m.json"), prompts_per_step=4, eval_size=0)
    topology, said = topology_of("cpu:1"), list[str]()
    error = jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nmore")
    with mock.patch.object(plan_search, "compiled_plan", side_effect=error):
        found = plan_search.search(config, topology._replace(chip=Chip("toy", 400.0, 900, 1600, 400)), said.append)
    assert found.first is not None
    assert found.first.fits
    assert not found.first.compiled
    assert said[1] == "the compiler failed, so this is an estimate: INTERNAL: RET_CHECK failure"


def test_on_a_cpu_the_devices_memory_is_the_hosts() -> None:
    config = TrainConfig(model=str(CONFIGS / "smollm2-135m.json"), prompts_per_step=4, eval_size=0, checkpoint_every=0)
    here = topology_of("cpu:1")
    own, other = (estimated_plan(config, here._replace(platform=platform)) for platform in ("cpu", "cuda"))
    assert other.host[COPY] == other.held["parameters"]  # while they are loaded
    assert own.host == other.host | {"arrays of the devices": own.peak, COPY: 0}
