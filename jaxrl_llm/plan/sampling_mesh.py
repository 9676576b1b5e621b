"""The mesh that a run samples on where its settings name none: the split of its devices that decodes fastest.

Decoding is bound by reading: on each device a step reads the device's share of the weights, which falls with the axes
"tensor" and "expert", and its share of the caches, which falls with all. Against that stand the all-reduces over
"tensor", two in each layer.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import AbstractMesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.distributed import check_mesh
from jaxrl_llm.distributed.chips import Chip
from jaxrl_llm.distributed.mesh import sampling_sizes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import DATA, EXPERT, TENSOR
from jaxrl_llm.plan.sampling import Sampling, abstract_mesh, divisors, mesh_text, sampled_shards, sampling_arithmetic
from jaxrl_llm.plan.shapes import StateShapes, engine_sizes
from jaxrl_llm.plan.times import program_calls, seconds_of
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import accepts

SAVES = 0.9  # another split must take less than this part of the time of one that is preferred: both are estimates
START = 5e-6  # seconds of a collective however little it sends, by assumption


class _Split(NamedTuple):
    """A way to sample on the devices of a run."""

    mesh: AbstractMesh
    sampling: Sampling
    size: Size  # of the engine of a host
    shards: int  # of a host's rows
    seconds: float  # of the decode steps of an iteration, at least; 0 where the chip's rates are not known


Splits = Callable[[AbstractMesh], list[_Split]]  # for a training mesh: its own split first


@dataclass(frozen=True)
class Devices:
    """What the choice of meshes depends on."""

    count: int
    hosts: int = 1  # each with as many devices
    memory: int = 0  # bytes of a device for programs and arrays; 0: no limit of its own
    slices: int = 1
    chip: Chip | None = None  # None: no rates are known, and a run samples on its own mesh
    platform: str = "cpu"


def splits_of(
    config: TrainConfig, algorithm: Algorithm, shapes: StateShapes, devices: Devices,
    sizes: dict[tuple[int, int], tuple[Size, Size | None]] | None = None,
) -> Splits:  # fmt: skip
    """The splits that a run may sample with: that of its mesh, and those within a host; or the one that it names.

    sizes: of engines, by slots and shards, as other calls have found them; what this one finds is added. InputError for
    a named split that does not fit the devices or the model.
    """
    model, found = shapes.policy.config, dict[tuple[int, int], _Split]()
    sizes = {} if sizes is None else sizes

    def split(expert: int, tensor: int) -> _Split:
        if (expert, tensor) not in found:
            found[expert, tensor] = _split(config, algorithm, shapes, devices, sizes, expert, tensor)
        return found[expert, tensor]

    if config.sampling_mesh:
        mesh = abstract_mesh({DATA: 1, TENSOR: 1, **sampling_sizes(config.sampling_mesh, devices.count)})
        check_mesh(model, mesh, "the sampling mesh")
        only = split(*_inner(mesh))
        return lambda mesh: [only]
    others = _within_a_host(model, devices) if devices.chip is not None and devices.chip.bandwidth else []
    return lambda mesh: [split(*one) for one in dict.fromkeys([_inner(mesh), *others])]


def fastest(splits: Iterable[_Split], kept: int, memory: float) -> _Split:
    """The first split, that of training, unless it does not fit or another one that fits is clearly faster.

    Of others that are about as fast it is the one with the fewest devices for a row: each of them repeats what the
    estimate leaves out, such as norms. kept: bytes on a device that stay there while tokens are sampled. memory: bytes
    that they may take together; where no split fits, it is the one that takes least.
    """
    own, *others = splits
    fitting = [one for one in (own, *others) if kept + one.sampling.peak <= memory]
    if not fitting:
        return min((own, *others), key=lambda one: one.sampling.peak)
    best = min(one.seconds for one in fitting)
    near = [one for one in fitting if best >= SAVES * one.seconds]
    return own if own in near else min(near, key=lambda one: (math.prod(_inner(one.mesh)), one.seconds))


def named_for(split: _Split, mesh: AbstractMesh) -> str:
    """The setting `sampling_mesh` with which a run on a mesh samples so: "" where that is the mesh's own split."""
    if _inner(split.mesh) == _inner(mesh):
        return ""
    return mesh_text(split.mesh) or f"{DATA}=1"


def _inner(mesh: AbstractMesh) -> tuple[int, int]:
    """Devices along "expert" and "tensor", on which sampling depends; all others are rows."""
    return mesh.shape.get(EXPERT, 1), mesh.shape.get(TENSOR, 1)


def _within_a_host(model: ModelConfig, devices: Devices) -> list[tuple[int, int]]:
    each, found = devices.count // devices.hosts, []
    for expert in divisors(each) if model.num_experts else [1]:
        for tensor in divisors(each // expert):
            sizes = {DATA: each // (expert * tensor), EXPERT: expert, TENSOR: tensor}
            found += [(expert, tensor)] if accepts(check_mesh, model, abstract_mesh(sizes)) else []
    return found


def _split(
    config: TrainConfig, algorithm: Algorithm, shapes: StateShapes, devices: Devices,
    sizes: dict[tuple[int, int], tuple[Size, Size | None]], expert: int, tensor: int,
) -> _Split:  # fmt: skip
    mesh = abstract_mesh({DATA: devices.count // (expert * tensor), EXPERT: expert, TENSOR: tensor})
    shards = sampled_shards(mesh, devices.hosts)
    if (key := (config.slots, shards)) not in sizes:
        sizes[key] = engine_sizes(config, algorithm, shards, devices.hosts)
    sampling = sampling_arithmetic(config, shapes, mesh, sizes[key], devices.hosts, devices.platform)
    size, seconds = sizes[key][0], 0.0
    if devices.chip is not None:
        step = seconds_of(sampling.costs["decode"], devices.chip, 1)
        starts = START * 2 * shapes.policy.config.num_layers * (tensor > 1) * (devices.chip.links > 0)
        steps = program_calls(config, size, devices.hosts, shards, "decode")
        seconds = steps * (max(step.memory, step.compute) + step.links + starts)
    return _Split(mesh, sampling, size, shards, seconds)
