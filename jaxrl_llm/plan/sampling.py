"""Sampling by arithmetic: bytes on a device, and what its programs cost there, for each split of the devices."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl_llm.distributed import bytes_per_device, parameter_specs
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.recurrent import empty_state
from jaxrl_llm.models.mesh_axes import DATA, EXPERT, SAMPLED_ROWS, TENSOR, row_shards
from jaxrl_llm.models.parameters import weights, without_critic
from jaxrl_llm.plan.program.cost import Cost
from jaxrl_llm.plan.shapes import StateShapes
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.kv_cache import columns, eight_bit
from jaxrl_llm.sampling.prefill import PREFILL_TOKENS
from jaxrl_llm.training.config import TrainConfig


class Sampling(NamedTuple):
    """Beside what training holds: bytes on a device by phase, as in `plan.Plan`, and the programs' costs."""

    phases: dict[str, dict[str, int]]
    costs: dict[str, Cost]

    @property
    def peak(self) -> int:
        """The most bytes on a device."""
        return max(sum(parts.values()) for parts in self.phases.values())


def sampling_arithmetic(
    config: TrainConfig, shapes: StateShapes, mesh: AbstractMesh, engines: tuple[Size, Size | None], hosts: int = 1,
    platform: str = "cpu",
) -> Sampling:  # fmt: skip
    """Sampling on a mesh, that of training or another one of its devices.

    engines: of a host, see `engine_sizes`. platform: of the devices.
    """
    model, (size, evaluation), own = shapes.policy.config, engines, sampled_shards(mesh, hosts)
    tensor = mesh.shape.get(TENSOR, 1)
    held = sampler_bytes(config, model, weight_bytes(shapes, mesh), mesh)
    states = config.dtype if config.activations == "dtype" else config.activations
    shares = mesh.size == 1 and config.dtype == config.param_dtype == "float32" and config.weight_dtype == "dtype"
    working = 2**28 + held // 50
    if platform == "tpu" and config.dtype == "float32":
        working += held // 2  # products read bfloat16, of which decoding makes a copy before its first step
    if config.sampling.truncating:
        working += 3 * 4 * size.shape.rows // own * model.vocab_size
    caches = {"sampling": cache_bytes(config.sampling.cache_dtype, model, size, own, tensor)}
    if evaluation is not None:
        caches["evaluation"] = cache_bytes(states, model, evaluation, own, tensor)
    phases = {
        name: {"sampler's weights": 0 if shares else held, "caches": cached, "temporaries": working}
        for name, cached in caches.items()
    }
    for what in ("sampler's weights", "caches"):
        phases["sampling"][what] *= shapes.engines
    return Sampling(phases, sampling_costs_of(config, model, mesh, held, caches["sampling"], size, own))


def weight_bytes(shapes: StateShapes, mesh: AbstractMesh) -> int:
    """Bytes on a device of the sampler's weights in the dtype of the computation, without padding."""
    decoder = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, shapes.policy.dtype), x)
        for name, x in without_critic(shapes.params).items()
    }  # fmt: skip
    specs = parameter_specs(shapes.policy.config, mesh, True, decoder)  # over "expert" and "tensor", on any hosts
    return bytes_per_device(decoder, {name: specs[name] for name in decoder}, mesh)


def sampler_bytes(config: TrainConfig, model: ModelConfig, whole: int, mesh: AbstractMesh) -> int:
    """Bytes on a device of the sampler's weights: projections of layers are one a number where they are rounded.

    whole: `weight_bytes`.
    """
    if config.weight_dtype == "dtype":
        return whole
    others, experts = matrix_sizes(model)
    numbers = (others + experts / mesh.shape.get(EXPERT, 1)) / mesh.shape.get(TENSOR, 1)
    return int(whole - (jnp.dtype(config.dtype).itemsize - 1) * numbers)


def sampled_shards(mesh: AbstractMesh, hosts: int = 1) -> int:
    """Slices of a host's rows while it samples."""
    return max(row_shards(mesh, SAMPLED_ROWS) // hosts, 1)


def cache_bytes(dtype: Any, model: ModelConfig, size: Size, shards: int, tensor: int) -> int:
    """Bytes on a device of an engine's caches."""
    item, total, (prompts, rows) = jnp.dtype(dtype).itemsize, 0, (size.shape.prompts, size.shape.rows)
    for number in range(model.num_layers):
        own = model.of_layer(number)
        if own.keys_of:
            continue
        if own.carries:
            state = jax.tree.leaves(jax.eval_shape(partial(empty_state, own, 1, dtype)))
            total += (prompts + rows) * sum(x.size * x.dtype.itemsize for x in state) // shards
            continue
        heads, *sizes = own.heads_kept(absorbed=True)
        each = sum(numbers * item + (4 if eight_bit(dtype) else 0) for numbers in sizes)
        places = prompts * columns(model, number, size.width) + rows * columns(model, number, size.tokens)
        total += places * heads * each // (shards * (tensor if heads % tensor == 0 else 1))
    return total + (rows * size.tokens * 20 + prompts * model.hidden_size * item) // shards


def matrix_sizes(model: ModelConfig) -> tuple[int, int]:
    """Numbers in all layers' matrices, but for routers: those of experts apart from the others."""
    matrices = [w for w in weights(model).values() if w.inputs and "layers" in w.axes and w.name != "router"]
    experts = sum(math.prod(weight.shape) for weight in matrices if "experts" in weight.axes)
    return sum(math.prod(weight.shape) for weight in matrices) - experts, experts


def pair_operations(model: ModelConfig) -> int:
    """Operations of all layers for a query and a key that it attends to."""
    each = (model.of_layer(number) for number in range(model.num_layers))
    return sum(2 * own.num_heads * sum(own.heads_kept(absorbed=False)[1:]) for own in each if not own.carries)


def sampling_costs_of(
    config: TrainConfig, model: ModelConfig, mesh: AbstractMesh, held: int, caches: int, size: Size, own: int
) -> dict[str, Cost]:
    """Operations, bytes and collectives of each program of sampling on a device.

    held, caches: bytes on a device of weights and caches. own: slices of a host's rows.
    """
    tensor = mesh.shape.get(TENSOR, 1)
    active = active_weights(model)
    head = 2 * model.hidden_size * model.vocab_size
    context = config.max_prompt_tokens + config.max_new_tokens / 2  # of a token, in the mean
    of_row = 2 * active + head + pair_operations(model) * context
    reduced = reduced_bytes(model, tensor, jnp.dtype(config.dtype).itemsize)
    rows = size.shape.rows / own
    prompts = min(max(PREFILL_TOKENS // size.width, 1), -(-size.shape.prompts // own))  # that are computed at once
    tokens = prompts * size.width
    prefill = estimate("prefill", tokens * 2 * active / tensor, held, all_reduce=tokens * reduced)
    decode = estimate("decode", rows * of_row / tensor, held + caches, all_reduce=rows * reduced)
    return {"prefill": prefill, "decode": decode}


def reduced_bytes(model: ModelConfig, tensor: int, item: int) -> float:
    """Bytes that a device sends in the all-reduces over "tensor" of one token's forward pass."""
    return 2 * (tensor - 1) / tensor * model.num_layers * 2 * model.hidden_size * item


def active_weights(model: ModelConfig) -> int:
    """Numbers in the matrices of all layers that a token meets."""
    others, experts = matrix_sizes(model)
    return others + experts * max(model.experts_per_token, 1) // max(model.num_experts, 1)


def estimate(name: str, flops: float, traffic: float, **sent: float) -> Cost:
    """The cost of a program by arithmetic. sent: bytes of collectives by kind."""
    collectives = {kind.replace("_", "-"): int(size) for kind, size in sent.items() if size >= 1}
    return Cost(name, 0, 0, 0, 0, flops, int(traffic), collectives, 0, {})


def divisors(number: int) -> list[int]:
    """Those of a whole number above 0, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def mesh_text(mesh: AbstractMesh) -> str:
    """A mesh as settings name it, without the axes of one device."""
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1)


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices; an axis of one device is left out where `make_mesh` does."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name in (DATA, TENSOR)}
    return AbstractMesh(tuple(kept.values()), tuple(kept))
