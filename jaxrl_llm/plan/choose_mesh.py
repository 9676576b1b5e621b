"""The mesh of a run that names none: chosen by arithmetic from the model, the devices and their memory."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from jaxrl_llm.algorithms import Given
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.distributed import check_mesh, check_rows, mesh_of
from jaxrl_llm.distributed.chips import GIB, Topology, chip_of_kind
from jaxrl_llm.distributed.hosts import all_hosts
from jaxrl_llm.distributed.mesh import mesh_sizes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import DATA, EXPERT, FSDP, TENSOR, row_shards
from jaxrl_llm.plan.estimate import arithmetic, held_bytes
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.plan.sampling import abstract_mesh, divisors, mesh_text
from jaxrl_llm.plan.sampling_mesh import Devices, fastest, named_for, splits_of
from jaxrl_llm.plan.shapes import state_shapes
from jaxrl_llm.training.asynchrony import by_task
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.utils.errors import accepts

ROOM = 0.9  # of a device's memory, which the estimate may take
RATIO = 1.6  # by which compilers' temporaries can exceed the estimate; see `estimate`


class Chosen(NamedTuple):
    """A mesh, and what it is estimated to take."""

    mesh: str  # as `TrainConfig.mesh`
    bytes: int  # the most on a device; 0: not estimated
    memory: int  # as in `Devices`
    sampling_mesh: str = ""  # as `TrainConfig.sampling_mesh`

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
    """The configuration with the meshes that it does not name, and a line that says which; unchanged on one device.

    A resumed run keeps its mesh, where that fits the devices. On several hosts all must call this. given: the
    algorithm, instead of the configured one. Raises InputError for a method or model that does not exist.
    """
    learning, _ = by_task(config)
    if len(learning) == 1 or (config.mesh and (config.sampling_mesh or config.sampler_devices)):
        return config, ""
    lines = []
    before = RunFolder(config.output).recorded_mesh() if resumed and not config.mesh else ""
    if before and accepts(mesh_of, before, learning):
        lines += [f"mesh {before}, as before; --mesh sets another"]
        config = dataclasses.replace(config, mesh=before)
    hosts = all_hosts()
    memory = min(hosts.gather(memory_of(jax.local_devices())))
    if not memory:
        if not config.mesh:
            lines += [Chosen(f"{DATA}={len(learning)}", 0, 0).line]
        return dataclasses.replace(config, mesh=config.mesh or f"{DATA}={len(learning)}"), "; ".join(lines)
    slices = len({getattr(device, "slice_index", 0) for device in learning})
    chip = chip_of_kind(jax.devices()[0].device_kind)
    devices = Devices(len(learning), hosts.count, memory, slices, chip, jax.default_backend())
    found, named = _chosen(config, make_algorithm(config, given), devices), config.mesh
    lines += [found.line] if not named else []
    if config.sampler_devices:  # which are others than those of the mesh
        found = found._replace(sampling_mesh=config.sampling_mesh)
    if found.sampling_mesh != config.sampling_mesh:
        lines += [f"sampled on {found.sampling_mesh}, which decodes faster; --sampling-mesh sets another"]
    return dataclasses.replace(config, mesh=found.mesh, sampling_mesh=found.sampling_mesh), "; ".join(lines)


def with_chosen_meshes(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The configuration with the meshes that a new run on these devices would choose; those that it names stay."""
    if len(topology.devices) == 1 or topology.platform == "cpu" or (config.mesh and config.sampling_mesh):
        return config
    chip = topology.chip
    count = len(topology.devices)
    devices = Devices(count, topology.hosts, chip.usable, topology.slices, chip, topology.platform)
    found = _chosen(config, make_algorithm(config), devices)
    return dataclasses.replace(config, mesh=found.mesh, sampling_mesh=found.sampling_mesh)


def _chosen(config: TrainConfig, algorithm: Algorithm, devices: Devices) -> Chosen:
    """`choose`, or for a mesh that the configuration names, the mesh to sample on."""
    model = config_of(config.model, config.sink_slots)
    if not config.mesh:
        return choose(config, model, algorithm, devices)
    mesh = abstract_mesh(mesh_sizes(config.mesh, devices.count))
    check_mesh(model, mesh)
    shapes = state_shapes(config, model, algorithm)
    kept = held_bytes(shapes, mesh, config.reference_memory).kept
    split = fastest(splits_of(config, algorithm, shapes, devices)(mesh), kept, ROOM * devices.memory)
    return Chosen(config.mesh, 0, devices.memory, config.sampling_mesh or named_for(split, mesh))


def memory_of(devices: Sequence[Any]) -> int:
    """Bytes for programs on the smallest of these devices; 0 where they share the host's memory, as CPUs do."""
    found = []
    for device in devices:
        chip, stats = chip_of_kind(device.device_kind), device.memory_stats() or {}
        found.append(int(stats.get("bytes_limit", chip.usable if chip else 0)))
    return 0 if any(device.platform == "cpu" for device in devices) else min(found)


def choose(config: TrainConfig, model: ModelConfig, algorithm: Algorithm, devices: Devices) -> Chosen:
    """The first of `candidates` that fits by arithmetic, with ROOM; else the one that takes least.

    Each with the mesh to sample on that `fastest` takes. Those that have prompts for all devices come before others.
    Where no candidate splits the rows of a step evenly, all devices are along "data", which `check_rows` then refuses.
    """
    shapes, least = state_shapes(config, model, algorithm), None
    splits, room = splits_of(config, algorithm, shapes, devices), ROOM * devices.memory
    rows = config.prompts_per_step * config.group_size, config.minibatches, config.micro_batches
    meshes = [mesh for mesh in candidates(model, devices) if accepts(check_rows, *rows, row_shards(mesh))]
    for mesh in sorted(meshes, key=lambda mesh: row_shards(mesh) > config.prompts_per_step):
        held = held_bytes(shapes, mesh, config.reference_memory)
        split = fastest(splits(mesh), held.kept, room)
        peak = arithmetic(config, model, algorithm, mesh, held, split.sampling, RATIO).peak
        found = Chosen(mesh_text(mesh), peak, devices.memory, config.sampling_mesh or named_for(split, mesh))
        if peak <= room:
            return found
        least = found if least is None or peak < least.bytes else least
    return least or Chosen(f"{DATA}={devices.count}", 0, 0)


def candidates(model: ModelConfig, devices: Devices) -> Iterator[AbstractMesh]:
    """Meshes that divide the model, the cheapest in communication first.

    "data" alone; "fsdp" in ever more devices, within a host before across hosts; for a mixture of experts the same with
    "expert", and then with "tensor", which must both lie in a host: they split the weights that each host samples with.
    """
    each = devices.count // devices.hosts
    for tensor in divisors(each):
        for expert in divisors(each // tensor) if model.num_experts else [1]:
            rest = devices.count // (tensor * expert)
            within = [size for size in divisors(rest) if each % (tensor * expert * size) == 0]
            for fsdp in [*within, *(size for size in divisors(rest) if size not in within)]:
                sizes = {DATA: rest // fsdp, FSDP: fsdp, EXPERT: expert, TENSOR: tensor}
                if devices.slices > 1 and all(sizes[name] % devices.slices for name in (DATA, FSDP)):
                    continue
                mesh = abstract_mesh({name: size for name, size in sizes.items() if size > 1 or name != EXPERT})
                if accepts(check_mesh, model, mesh):
                    yield mesh
