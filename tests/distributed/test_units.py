"""The units in which hosts sample: which devices they are, and what each holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl_llm.distributed import bytes_per_device, parameter_specs
from jaxrl_llm.distributed.hosts import by_unit, of_this_host
from jaxrl_llm.models.parameters import parameter_shapes
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.plan.shapes import state_shapes as shapes_of_state
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.utils.errors import InputError

MIXTURE = Path(__file__).parents[2] / "experiments" / "plan" / "qwen3-30b-a3b.json"


@dataclass(frozen=True)
class Device:
    """What meshes ask of a device."""

    id: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5p"


def mesh_on(sizes: dict[str, int], hosts: int) -> Mesh:
    count = math.prod(sizes.values())
    devices = np.array([Device(i, i * hosts // count) for i in range(count)], object)
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("sizes", "hosts", "units"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, 2, {"unit": 2, "data": 2, "tensor": 2}),
        ({"data": 8}, 4, {"unit": 4, "data": 2, "tensor": 1}),
        ({"data": 1, "sequence": 4, "tensor": 1}, 2, {"unit": 2, "data": 2, "tensor": 1}),
        ({"data": 1, "tensor": 4}, 2, {"unit": 1, "data": 1, "tensor": 4}),
        ({"data": 2, "tensor": 2}, 4, {"unit": 2, "data": 1, "tensor": 2}),
        ({"data": 3, "tensor": 4}, 6, {"unit": 3, "data": 1, "tensor": 4}),
        ({"data": 2, "expert": 4, "tensor": 1}, 2, {"unit": 2, "data": 1, "expert": 4, "tensor": 1}),
        ({"data": 1, "expert": 2, "sequence": 2, "tensor": 1}, 2, {"unit": 1, "data": 2, "expert": 2, "tensor": 1}),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, 2, {"unit": 2, "data": 1, "expert": 2, "tensor": 2}),
    ],
)
def test_a_unit_is_as_few_hosts_as_hold_whole_rows(sizes: dict[str, int], hosts: int, units: dict[str, int]) -> None:
    mesh = mesh_on(sizes, hosts)
    found = by_unit(mesh)
    assert dict(found.shape) == units
    assert sorted(device.id for device in found.devices.flat) == list(range(mesh.size))
    together = hosts // units["unit"]
    for number, one in enumerate(found.devices):
        assert {device.process_index // together for device in one.flat} == {number}
    own = of_this_host(mesh)  # of process 0
    assert (own.devices == found.devices[0]).all()
    assert own.axis_names == found.axis_names[1:]


def test_a_host_alone_samples_on_the_mesh_as_it_is() -> None:
    mesh = mesh_on({"data": 2, "fsdp": 2, "tensor": 1}, 1)
    assert of_this_host(mesh) is mesh


def test_unequal_hosts_are_refused() -> None:
    devices = np.array([Device(i, int(i > 0)) for i in range(3)], object)
    with pytest.raises(InputError, match="every host needs as many devices, but host 0 has 1, host 1 has 2"):
        by_unit(Mesh(devices, ("data",), axis_types=(AxisType.Auto,)))


def test_each_device_of_a_host_holds_its_experts_while_it_samples() -> None:
    model, config = config_of(str(MIXTURE)), TrainConfig(param_dtype="bfloat16")
    params = shapes_of_state(config, model, make_algorithm(config)).params
    own = of_this_host(mesh_on({"data": 4, "expert": 4, "tensor": 1}, 4))
    held = bytes_per_device(params, parameter_specs(model, own), own)
    of_experts = sum(
        math.prod(shape) for path, shape in parameter_shapes(model).items() if path[-1] in ("gate", "up", "down")
    )
    rest = sum(math.prod(shape) for shape in parameter_shapes(model).values()) - of_experts
    assert of_experts > 9 * rest
    assert held == 2 * (rest + of_experts // 4)
