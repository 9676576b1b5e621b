"""The mesh of a run that names none: chosen by arithmetic from the model, the devices and their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from jaxrl_llm.algorithms import Algorithm, Given
from jaxrl_llm.distributed import check_mesh, check_rows, mesh_of
from jaxrl_llm.distributed.chips import GIB, Topology, chip_of_kind
from jaxrl_llm.distributed.hosts import all_hosts
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.placement import DATA, EXPERT, FSDP, TENSOR, row_shards
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.method import make_algorithm
from jaxrl_llm.runs.plan_arithmetic import abstract_mesh, arithmetic, held_bytes
from jaxrl_llm.runs.plan_shapes import config_of, engine_sizes, state_shapes
from jaxrl_llm.runs.run_folder import RunFolder

ROOM = 0.9  # of a device's memory, which the estimate may take
RATIO = 1.6  # by which compilers' temporaries can exceed the estimate; see `plan_arithmetic`


@dataclass(frozen=True)
class Devices:
    """What the choice depends on."""

    count: int
    hosts: int = 1  # each with as many devices
    memory: int = 0  # bytes of a device for programs and arrays; 0: no limit of its own
    slices: int = 1


class Chosen(NamedTuple):
    """A mesh, and what it is estimated to take."""

    mesh: str  # as `TrainConfig.mesh`
    bytes: int  # the most on a device; 0: not estimated
    memory: int  # as in `Devices`

    @property
    def line(self) -> str:
        """For the console.

        >>> Chosen("fsdp=4", 8 * 2**30, 16 * 2**30).line
        'mesh fsdp=4, chosen because a device then needs about 8.0 of its 16.0 GiB; --mesh sets another'
        """
        if not self.memory:
            return f"mesh {self.mesh}, chosen because these devices have no memory of their own; --mesh sets another"
        needed = f"{self.bytes / GIB:.1f} of its {self.memory / GIB:.1f} GiB"
        if self.bytes <= self.memory:
            return f"mesh {self.mesh}, chosen because a device then needs about {needed}; --mesh sets another"
        return (
            f"mesh {self.mesh}, chosen because it needs least, but a device needs about {needed}: jaxrl plan says what "
            "else to change"
        )


def with_mesh(config: TrainConfig, resumed: bool, given: Given | None = None) -> tuple[TrainConfig, str]:
    """The configuration with a mesh, and a line that says which; unchanged where it names one, or on one device.

    A resumed run keeps its mesh, where that fits the devices. On several hosts all must call this. given:
    the algorithm, instead of the configured one. Raises InputError for a method or model that does not exist.
    """
    if config.mesh or jax.device_count() == 1:
        return config, ""
    before = RunFolder(config.output).recorded_mesh() if resumed else ""
    if before and _fits(before):
        return dataclasses.replace(config, mesh=before), f"mesh {before}, as before; --mesh sets another"
    hosts = all_hosts()
    memory = min(hosts.gather(memory_of(jax.local_devices())))
    slices = len({getattr(device, "slice_index", 0) for device in jax.devices()})
    devices = Devices(jax.device_count(), hosts.count, memory, slices)
    if not memory:
        found = Chosen(f"{DATA}={devices.count}", 0, 0)
    else:
        found = choose(config, config_of(config.model), make_algorithm(config, given), devices)
    return dataclasses.replace(config, mesh=found.mesh), found.line


def planned(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The configuration with the mesh that a new run on these devices would choose; unchanged where it names one."""
    if config.mesh or len(topology.devices) == 1 or topology.platform == "cpu":
        return config
    devices = Devices(len(topology.devices), topology.hosts, topology.chip.usable, topology.slices)
    found = choose(config, config_of(config.model), make_algorithm(config), devices)
    return dataclasses.replace(config, mesh=found.mesh)


def _fits(mesh: str) -> bool:
    try:
        mesh_of(mesh)
    except InputError:
        return False
    return True


def memory_of(devices: Sequence[Any]) -> int:
    """Bytes for programs on the smallest of these devices; 0 where they share the host's memory, as CPUs do."""
    found = []
    for device in devices:
        chip, stats = chip_of_kind(device.device_kind), device.memory_stats() or {}
        found.append(int(stats.get("bytes_limit", chip.usable if chip else 0)))
    return 0 if any(device.platform == "cpu" for device in devices) else min(found)


def choose(config: TrainConfig, model: ModelConfig, algorithm: Algorithm, devices: Devices) -> Chosen:
    """The first of `candidates` that fits by arithmetic, with ROOM; else the one that takes least.

    Where no candidate splits the rows of a step evenly, all devices are along "data", which `check_rows` then refuses.
    """
    shapes, least = state_shapes(config, model, algorithm), None
    for mesh in candidates(model, devices):
        if not _splits_rows(config, mesh):
            continue
        own = max(row_shards(mesh) // devices.hosts, 1)
        held = held_bytes(shapes, mesh, config.reference_memory)
        sizes = engine_sizes(config, algorithm, own, devices.hosts)
        peak = arithmetic(config, model, algorithm, mesh, held, sizes, devices.hosts, RATIO).peak
        text = ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)
        found = Chosen(text, peak, devices.memory)
        if peak <= ROOM * devices.memory:
            return found
        least = found if least is None or peak < least.bytes else least
    return least or Chosen(f"{DATA}={devices.count}", 0, 0)


def candidates(model: ModelConfig, devices: Devices) -> Iterator[AbstractMesh]:
    """Meshes that divide the model, the cheapest in communication first.

    "data" alone; "fsdp" in ever more devices, within a host before across hosts; for a mixture of experts the same with
    "expert", and then with "tensor", which must both lie in a host: they split the weights that each host samples with.
    """
    each = devices.count // devices.hosts
    experts = _divisors(each) if model.num_experts else [1]
    for tensor in _divisors(each):
        for expert in experts:
            if each % (tensor * expert):
                continue
            rest = devices.count // (tensor * expert)
            within = [size for size in _divisors(rest) if each % (tensor * expert * size) == 0]
            for fsdp in [*within, *(size for size in _divisors(rest) if size not in within)]:
                sizes = {DATA: rest // fsdp, FSDP: fsdp, EXPERT: expert, TENSOR: tensor}
                if devices.slices > 1 and all(sizes[name] % devices.slices for name in (DATA, FSDP)):
                    continue
                mesh = abstract_mesh({name: size for name, size in sizes.items() if size > 1 or name != EXPERT})
                try:
                    check_mesh(model, mesh)
                except InputError:
                    continue
                yield mesh


def _splits_rows(config: TrainConfig, mesh: AbstractMesh) -> bool:
    rows = config.prompts_per_step * config.group_size
    try:
        check_rows(rows, config.minibatches, config.micro_batches, row_shards(mesh))
    except InputError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
