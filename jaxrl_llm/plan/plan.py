"""What a run would need on a topology: its own programs, compiled for devices that need not be there.

Memory is what the compiler says of these programs. The sampler's, whose layers are unrolled, are compiled with two
small numbers of layers, and continued on a line. Time is the least that each program can take on its most loaded
resource: operations at the chip's peak, bytes at its memory's bandwidth, what collectives send at its links' rate, or
the TPU compiler's own estimate of cycles, with the collectives that its schedule does not hide (`program.schedule`).
"""

import dataclasses
from collections.abc import MutableMapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.distributed.aot import Program
from jaxrl_llm.distributed.chips import Chip, Topology
from jaxrl_llm.distributed.hosts import of_this_host, units_of
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.setup import compile_learning
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards
from jaxrl_llm.plan.estimate import COPY, Arithmetic, arithmetic, held_bytes, host_memory
from jaxrl_llm.plan.full_batch import full_batch
from jaxrl_llm.plan.models import depths
from jaxrl_llm.plan.program.cost import Cost, at_depth, cost_of, followed, matrix_flops
from jaxrl_llm.plan.sampling import abstract_mesh, sampling_arithmetic
from jaxrl_llm.plan.sampling_programs import NAMES, compile_sampling, tail_arrays
from jaxrl_llm.plan.shapes import (
    RunShapes,
    StateShapes,
    bytes_on_a_device,
    engine_sizes,
    held_by,
    plan_inputs,
    records,
    shapes_of,
    state_shapes,
)
from jaxrl_llm.plan.times import Seconds, program_calls, seconds_of
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import rollout_of

SAMPLING = NAMES  # the programs of sampling; the others are of learning
Programs = dict[str, Program]  # by name
Costs = dict[str, Cost]
Sampled = MutableMapping[str, Costs]  # see `compiled_plan`


class Plan(NamedTuple):
    """Bytes on each device, and seconds of an iteration."""

    config: TrainConfig
    compiled: bool  # or estimated
    chip: Chip
    devices: int
    rented: int  # chips
    mesh: dict[str, int]
    sampler: dict[str, int]  # the mesh that it samples on
    held: dict[str, int]  # all the time: parameters, optimiser, reference ...
    phases: dict[str, dict[str, int]]  # beside `held` in each phase
    costs: dict[str, Cost]  # none where nothing was compiled
    seconds: dict[str, Seconds]
    host: dict[str, int]  # on each host

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes on a device in each phase."""
        held = sum(self.held.values())
        return {name: held + sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def peak(self) -> int:
        """The most bytes on a device."""
        return max(self.peaks.values())

    @property
    def least(self) -> int:
        """Bytes on a device that are there whatever the temporaries."""
        sure = (sum(size for name, size in parts.items() if name != "temporaries") for parts in self.phases.values())
        return sum(self.held.values()) + max(sure)

    @property
    def fits(self) -> bool:
        """Whether they are no more than a chip has for programs."""
        return self.peak <= self.chip.usable

    @property
    def iteration(self) -> float:
        """Seconds of an iteration, at least; 0 where the chip's speed is not known."""
        return sum(max(each) for each in self.seconds.values())

    @property
    def new_tokens(self) -> int:
        """Tokens sampled in an iteration, at most."""
        return self.config.prompts_per_step * self.config.group_size * self.config.max_new_tokens

    @property
    def chip_hours(self) -> float:
        """Of the whole run, at least."""
        return self.iteration * self.config.steps * self.rented / 3600


def estimated_plan(config: TrainConfig, topology: Topology) -> Plan:
    """The plan by arithmetic: what is held is exact, temporaries and times are estimates."""
    mesh, sampler, algorithm, model = plan_inputs(config, topology)
    state, units = state_shapes(config, model, algorithm), units_of(sampler)
    sizes = engine_sizes(config, algorithm, row_shards(of_this_host(sampler), SAMPLED_ROWS), units, model.max_positions)
    abstract, sampled_on = (abstract_mesh(dict(one.shape)) for one in (mesh, sampler))
    held = held_bytes(state, abstract, config.reference_memory)
    sampling = sampling_arithmetic(config, state, sampled_on, sizes, units, topology.platform)
    found = arithmetic(config, model, algorithm, abstract, held, sampling)
    return _assembled(config, topology, mesh, sampler, sizes[0], state, found, compiled=False)


def lowered_plan(config: TrainConfig, topology: Topology) -> Plan:
    """`estimated_plan`, with the operations of the learning half counted on its programs, lowered for the platform.

    For platforms without a compiler here. The sampler's programs are lowered too, with few layers.
    """
    found, shapes = estimated_plan(config, topology), shapes_of(config, topology)
    costs = dict(found.costs)
    for name, program in learning_programs(shapes, topology.platform).items():
        if name in costs:
            flops = matrix_flops(program.jaxpr, topology.platform) / len(topology.devices)
            costs[name] = costs[name]._replace(flops=flops)
    layers = min(depths(shapes.policy.config)[0], shapes.policy.config.num_layers)
    sampling_programs(shapes_of(config, topology, shapes.policy.config.first(layers)), topology.platform)
    return found._replace(costs=costs, seconds=_times(config, topology, shapes.sampler, shapes.size, costs))


def compiled_plan(config: TrainConfig, topology: Topology, sampled: Sampled | None = None) -> Plan:
    """The plan of a run's own programs, compiled for a topology. InputError for what the run would refuse.

    sampled: of sampling programs, by the settings that they read, what other plans for this topology have found;
    what this one finds is added.
    """
    shapes, sampled = shapes_of(config, topology), {} if sampled is None else sampled
    of_learning: dict[str, Any] = {"optimizer": OptimizerConfig(), "micro_batches": 1, "remat": True}
    of_learning |= {"keep_projections": False, "reference_memory": "device"}
    key = repr(dataclasses.replace(config, **of_learning))
    # The update takes the compiler longer than all other programs together, which are compiled beside it; but libtpu
    # crashes where two programs with parts for SparseCores are compiled at the same time.
    in_turns = topology.chip.sparse_cores
    if in_turns and key not in sampled:
        sampled[key] = sampling_costs(shapes)
    with ThreadPoolExecutor(1) as beside:
        sampling = None if key in sampled else beside.submit(sampling_costs, shapes)
        learning = learning_costs(shapes, None if in_turns else beside)
        if sampling is not None:
            sampled[key] = sampling.result()
        costs = {**sampled[key], **learning}
    held, update = held_by(shapes), costs["update"]
    # What the compiler counts of the arguments beyond their numbers is the padding of the chip's layouts.
    held["padding"] = max(update.arguments - update.given, 0)
    engine = shapes.engine()
    sampler = bytes_on_a_device(engine.weights)
    caches = bytes_on_a_device((engine.prefix_cache, engine.ring_cache, engine.parked))
    if width := config.speculative_tokens:
        caches += bytes_on_a_device(tail_arrays(engine, shapes.size, shapes.own, width))
    of_sampling = {name: costs[name] for name in SAMPLING if name in costs}
    working = {
        "padding": max(max(cost.arguments - cost.given, 0) for cost in of_sampling.values()),
        "temporaries": max(cost.temporaries for name, cost in of_sampling.items() if name != "convert"),
    }
    engines = rollout_of(config, shapes.learner.algorithm).demands.engines
    phases = {"sampling": {"sampler's weights": engines * sampler, "caches": engines * caches, **working}}
    if "convert" in costs:
        phases = {"convert": {"sampler's weights": sampler, "temporaries": costs["convert"].temporaries}} | phases
    if shapes.evaluation is not None:
        other = shapes.engine(shapes.evaluation)
        caches = bytes_on_a_device((other.prefix_cache, other.ring_cache))
        phases["evaluation"] = {"sampler's weights": sampler, "caches": caches, **working}
    given = sum(held[name] for name in ("parameters", "frozen", "optimiser"))
    batch = max(update.given - given, 0)
    for name, cost in costs.items():
        if name not in SAMPLING:
            phases[name] = {"batch": batch, "temporaries": cost.temporaries + max(cost.results, 0)}
    found = Arithmetic(held, phases, costs)
    return _assembled(config, topology, shapes.mesh, shapes.sampler, shapes.size, shapes, found, compiled=True)


def _assembled(
    config: TrainConfig, topology: Topology, mesh: Mesh, sampler: Mesh, size: Size, arrays: RunShapes | StateShapes,
    found: Arithmetic, *, compiled: bool,
) -> Plan:  # fmt: skip
    plan = Plan(
        config, compiled, topology.chip, len(topology.devices), topology.rented, dict(mesh.shape),
        dict(sampler.shape), *found, _times(config, topology, sampler, size, found.costs),
        host_memory(config, topology, arrays),
    )  # fmt: skip
    if topology.platform != "cpu":
        return plan
    # The devices' memory is the host's: a copy of the weights or of the state counts beyond what the phases take.
    devices = plan.peak * plan.devices
    copy = plan.host[COPY] + sum(plan.held.values()) * plan.devices
    return plan._replace(host=plan.host | {"arrays of the devices": devices, COPY: max(copy - devices, 0)})


def _times(config: TrainConfig, topology: Topology, sampler: Mesh, size: Size, costs: Costs) -> dict[str, Seconds]:
    own = row_shards(of_this_host(sampler), SAMPLED_ROWS)
    units = units_of(sampler)
    return {
        name: seconds_of(cost, topology.chip, program_calls(config, size, units, own, name))
        for name, cost in costs.items()
    }


def learning_costs(shapes: RunShapes, beside: Executor | None = None) -> dict[str, Cost]:
    """Of the programs of the learning half, in their order. Those that are compiled twice are numbered.

    beside: see `ahead_of_time`.
    """
    programs = learning_programs(shapes, beside=beside)
    return {name: cost_of(program, slices_of(shapes)) for name, program in programs.items()}


def learning_programs(shapes: RunShapes, platform: str | None = None, beside: Executor | None = None) -> Programs:
    """The learning half's programs by name, as a run compiles them; those compiled twice are numbered.

    platform, beside: see `ahead_of_time`.
    """
    learner = shapes.learner
    model = learner.policy.config
    batch = full_batch(shapes.config, learner.algorithm, model.vocab_size, model)
    found: Programs = {}
    for program in compile_learning(learner, shapes.state.params, batch, platform=platform, beside=beside):
        number = sum(name.split(" ")[0] == program.name for name in found)
        found[f"{program.name} {number + 1}" if number else program.name] = program
    return found


def slices_of(shapes: RunShapes) -> list[int]:
    """The slice of each device of the mesh, in its order."""
    return [int(getattr(device, "slice_index", 0) or 0) for device in shapes.mesh.devices.flat]


def sampling_costs(shapes: RunShapes) -> dict[str, Cost]:
    """Of the engine's programs, at the model's depth; of "decode", of one step of its loop."""
    model = shapes.policy.config
    low, high = depths(model)
    if high >= model.num_layers:
        return _sampling_costs(shapes)
    small, large = (_sampling_costs(shapes_of(shapes.config, shapes.topology, model.first(n))) for n in (low, high))
    return {name: at_depth(small[name], large[name], (low, high), model.num_layers) for name in large}


def _sampling_costs(shapes: RunShapes) -> dict[str, Cost]:
    """With the conversion of all layers in one cost."""
    slices, programs = slices_of(shapes), sampling_programs(shapes)
    found = {name: cost_of(program, slices, turn=name == "decode") for name, program in programs.items()}
    if (layer := found.pop("convert_layer", None)) is not None:
        found["convert"] = followed(found["convert"], layer, shapes.policy.config.num_layers)
    return found


def sampling_programs(shapes: RunShapes, platform: str | None = None, names: tuple[str, ...] = NAMES) -> Programs:
    """The engine's programs by name, as a run compiles them. platform, names: see `compile_sampling`."""
    config = shapes.config.sampling
    return compile_sampling(
        shapes.policy, shapes.params, shapes.sampler, shapes.size, cache_dtype=jnp.dtype(config.cache_dtype),
        filtered=config.truncating, platform=platform, own=shapes.own, weight_dtype=config.weight_dtype, names=names,
        speculative_tokens=config.speculative_tokens, record=records(shapes.learner.algorithm, shapes.policy.config),
    )  # fmt: skip
