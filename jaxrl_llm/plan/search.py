"""What to change so that a run fits: configurations tried by arithmetic first, the best of them compiled.

A change has a price: nothing where the results stay what they are and only the speed changes, more where numbers are
rounded, most where the method is another one. The cheapest changes that fit are taken; among their meshes and
micro-batches, what takes the least time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.distributed import check_mesh
from jaxrl_llm.distributed.chips import Topology
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import DATA, EXPERT, FSDP, SEQUENCE, TENSOR, row_shards
from jaxrl_llm.plan.estimate import HeldBytes, arithmetic, held_bytes, length_of
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.plan.plan import Plan, Sampled, compiled_plan, estimated_plan, lowered_plan
from jaxrl_llm.plan.sampling import abstract_mesh, divisors, mesh_text
from jaxrl_llm.plan.sampling_mesh import Devices, Splits, fastest, named_for, splits_of
from jaxrl_llm.plan.shapes import StateShapes, plan_inputs, state_shapes
from jaxrl_llm.plan.times import program_calls, seconds_of
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.other_policies.reference import wants_reference
from jaxrl_llm.utils.errors import InputError, accepts

COMPILED = 3  # configurations that a search compiles at most
MARGIN = 0.97  # of the memory, which an estimate may take
RANK = 16  # of the adapters that are tried
LONG = 8192  # tokens of a row, from which on the axis "sequence" is tried
HOPELESS = 2  # times the memory: what needs more by the estimate is not compiled
# Of the update's temporaries, by which the estimate is multiplied for TPUs: to compile a second configuration costs
# minutes. Where there is much memory, the compiler takes more than it does where there is little.
RATIO, LARGE, RATIO_OF_LARGE = 1.1, 64, 1.6
Change = dict[str, Any]  # setting -> value; "optimizer.moments" is the optimiser's


class SearchResult(NamedTuple):
    """What a search found."""

    first: Plan | None  # of the configuration as it was given; None where it cannot run
    refused: str  # why it cannot
    best: Plan | None  # of the changed one; None where none fits, or none is needed
    changes: Change


class _Candidate(NamedTuple):
    """Changes that may make a run fit."""

    changes: Change
    config: TrainConfig
    seconds: float  # of an iteration, by arithmetic


def search(
    config: TrainConfig, topology: Topology, say: Callable[[str], None] = lambda text: None,
    asked: TrainConfig | None = None,
) -> SearchResult:  # fmt: skip
    """The plan of a run and, where it does not fit, of the cheapest changes that make it fit.

    Programs are compiled where there is a compiler and arithmetic does not already refuse them. say: told what is tried
    next. asked: the configuration before its meshes were chosen, if they were. Raises InputError for what no change of
    mesh, memory or precision can mend.
    """
    first, refused = None, ""
    tried: list[TrainConfig] = []
    sampled: Sampled = {}
    least = 1.0
    if topology.platform == "tpu":
        least = RATIO_OF_LARGE if topology.chip.memory > LARGE else RATIO
    ratio = least
    model, algorithm = config_of(config.model, config.sink_slots), make_algorithm(config)
    try:
        say("planning the run as it is")
        first = _plan(config, topology, sampled, say)
        if first.fits:
            return SearchResult(first, "", None, {})
        ratio = _ratio(first, topology) or least
    except InputError as error:
        refused = str(error)
    for _ in range(COMPILED):
        for best in candidates(asked or config, model, algorithm, topology, ratio):
            new = best.config not in tried
            tried.append(best.config)
            if new and accepts(plan_inputs, best.config, topology):
                break
        else:
            break
        say(f"trying {train_options(best.changes)}")
        found = _plan(best.config, topology, sampled, say)
        if found.fits:
            return SearchResult(first, refused, found, best.changes)
        ratio = max(ratio * 1.1, _ratio(found, topology))
    if first is None:
        raise InputError(f"{refused} (and no other mesh or setting that was tried fits {topology.chip.name})")
    return SearchResult(first, refused, None, {})


def _plan(config: TrainConfig, topology: Topology, sampled: Sampled, say: Callable[[str], None]) -> Plan:
    """The plan: only estimated where it cannot fit or the compiler fails, only lowered where there is no compiler."""
    estimate = estimated_plan(config, topology)
    if max(estimate.least, estimate.peak / HOPELESS) > topology.chip.usable:
        return estimate
    if topology.platform == "cuda":
        return lowered_plan(config, topology)
    try:
        return compiled_plan(config, topology, sampled)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            # libtpu's compiler has errors of its own in programs for several slices.
            say(f"the compiler failed, so this is an estimate: {str(error).splitlines()[0][:200]}")
            return estimate
        # The compiler gives up on programs far beyond the memory.
        update = estimate.phases["update"] | {"temporaries": topology.chip.usable}
        return estimate._replace(phases=estimate.phases | {"update": update})


def _ratio(found: Plan, topology: Topology) -> float:
    """What the compiler says of the update's temporaries, in terms of the estimate; 0 where it says nothing."""
    if not found.compiled:
        return 0.0
    estimate = estimated_plan(found.config, topology).phases["update"]["temporaries"]
    return max(found.phases["update"]["temporaries"] / max(estimate, 1), 0.5)


def candidates(
    config: TrainConfig, model: ModelConfig, algorithm: Algorithm, topology: Topology, ratio: float = 1.0
) -> Iterator[_Candidate]:
    """Configurations that fit by arithmetic: the cheapest changes first and, of one price, the fastest.

    ratio: by which the estimate of the update's temporaries is multiplied.
    """
    chip, hosts = topology.chip, topology.hosts
    meshes = list(_meshes(model, len(topology.devices), hosts, length_of(config) >= LONG))
    states: dict[str, tuple[StateShapes, Callable[[AbstractMesh], HeldBytes]]] = {}
    sizes: dict[tuple[int, int], tuple[Size, Size | None]] = {}
    splits: dict[str, Splits] = {}
    devices = Devices(len(topology.devices), hosts, chip.usable, topology.slices, chip, topology.platform)

    for changes in _settings(config, algorithm):
        try:
            changed = applied(config, changes)
        except InputError:  # the settings do not go together
            continue
        weights = changed.dtype, changed.param_dtype, changed.lora_rank
        if (key := repr((*weights, changed.optimizer, changed.reference_memory))) not in states:
            state = state_shapes(changed, model, algorithm)
            states[key] = state, cache(partial(held_bytes, state, reference_memory=changed.reference_memory))
        state, held_on = states[key]
        if (key := repr((*weights, changed.cache_dtype, changed.slots))) not in splits:
            splits[key] = splits_of(changed, algorithm, state, devices, sizes)
        by_micro: dict[int, TrainConfig] = {}
        fitting = []
        for mesh in meshes:
            of_mesh = held_on(mesh)
            split = fastest(splits[key](mesh), of_mesh.kept, MARGIN * chip.usable)
            for micro in _micro_batches(changed, mesh):
                if micro not in by_micro:
                    by_micro[micro] = dataclasses.replace(changed, micro_batches=micro)
                found = arithmetic(by_micro[micro], model, algorithm, mesh, of_mesh, split.sampling, ratio)
                if found.peak <= MARGIN * chip.usable:
                    times = partial(program_calls, changed, split.size, hosts, split.shards)
                    seconds = sum(max(seconds_of(cost, chip, times(name))) for name, cost in found.costs.items())
                    sampler = config.sampling_mesh or named_for(split, mesh)
                    fitting.append((seconds, micro, mesh.shape.get(TENSOR, 1), mesh_text(mesh), sampler))
                    break  # more micro-batches take longer
        for seconds, micro, _, text, sampler in sorted(fitting):
            more: Change = {"mesh": text}
            more |= {"sampling_mesh": sampler} if sampler != config.sampling_mesh else {}
            more |= {"micro_batches": micro} if micro != config.micro_batches else {}
            named = dataclasses.replace(by_micro[micro], mesh=text, sampling_mesh=sampler)
            yield _Candidate(changes | more, named, seconds)


def applied(config: TrainConfig, changes: Change) -> TrainConfig:
    """The configuration with some settings changed. InputError where they do not go together."""
    own = {name: value for name, value in changes.items() if "." not in name}
    inner = {name.partition(".")[2]: value for name, value in changes.items() if "." in name}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **inner), **own)


def train_options(changes: Change) -> str:
    """The options of `jaxrl train` for some changes."""
    words = []
    for name, value in changes.items():
        option = name.replace("_", "-") if "." not in name else name
        words.append(f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option} {value}")
    return " ".join(words)


def _settings(config: TrainConfig, algorithm: Algorithm) -> list[Change]:
    """Combinations of changes, the cheapest first: each change has a price."""
    Priced = list[tuple[float, Change]]
    kept: Priced = [(0, {})]
    precision, moments, caches, slots, remat, host = (list(kept) for _ in range(6))
    if config.dtype == "float32":
        precision += [(4, {"dtype": "bfloat16"})]
        caches += [(2, {"cache_dtype": "bfloat16"})] * (config.cache_dtype == "dtype")
    if config.param_dtype == "float32":
        changed = {"param_dtype": "bfloat16"} | ({"dtype": "bfloat16"} if config.dtype == "float32" else {})
        precision += [(6, changed)]
    if config.optimizer.moments == "float32":
        moments += [(3, {"optimizer.moments": "bfloat16"})]
    if config.optimizer.moments != "factored":
        moments += [(20, {"optimizer.moments": "factored"})]
    if config.cache_dtype not in ("int8", "float8"):
        caches += [(8, {"cache_dtype": "int8"})]
    rows = config.slots or config.prompts_per_step * config.group_size
    slots += [(n, {"slots": rows >> n}) for n in range(1, 6) if rows >> n >= 1]
    if not config.remat or config.keep_projections:
        remat += [(1, {"remat": True, "keep_projections": False})]
    if wants_reference(config, algorithm) and config.reference_memory == "device" and not config.adapts:
        host += [(2, {"reference_memory": "host"})]
    adapters: Priced = [*kept] + ([(50, {"lora_rank": RANK})] if not config.adapts else [])
    found: Priced = []
    for parts in itertools.product(precision, moments, caches, slots, remat, host, adapters):
        found.append((sum(price for price, _ in parts), {k: v for _, change in parts for k, v in change.items()}))
    return [changes for _, changes in sorted(found, key=lambda one: one[0])]


def _meshes(model: ModelConfig, devices: int, hosts: int, long: bool) -> Iterator[AbstractMesh]:
    """The meshes of so many devices that divide the model, and whose axis "tensor" divides a host's devices.

    "expert" is tried for mixtures, "sequence" where rows are long.
    """
    every = divisors(devices)
    experts = every if model.num_experts else [1]
    for tensor, fsdp, expert, sequence in itertools.product(every, every, experts, every if long else [1]):
        inner = tensor * fsdp * expert * sequence
        if devices % inner == 0 and (devices // hosts) % tensor == 0:
            sizes = {DATA: devices // inner, FSDP: fsdp, EXPERT: expert, SEQUENCE: sequence, TENSOR: tensor}
            if accepts(check_mesh, model, mesh := abstract_mesh(sizes)):
                yield mesh


def _micro_batches(config: TrainConfig, mesh: AbstractMesh) -> list[int]:
    """The numbers of micro-batches, no fewer than now, into which a step's prompts and rows split evenly."""
    prompts, parts = config.prompts_per_step, config.minibatches
    rows = prompts * config.group_size
    return [
        n for n in range(config.micro_batches, prompts // parts + 1)
        if prompts % (parts * n) == 0 and rows % (parts * n * row_shards(mesh)) == 0
    ]  # fmt: skip
