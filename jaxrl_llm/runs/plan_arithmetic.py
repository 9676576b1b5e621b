"""A plan by arithmetic, in milliseconds: what is held is exact, temporaries are estimated.

What was compiled for v5e took 1.39 times (Qwen3-8B, fsdp=4,tensor=4) and 1.42 times (SmolLM2-135M, data=4) the
temporaries of the update that are estimated, and Llama-3.1-70B on v5p, whose compiler has more memory to use, more
still: the search multiplies them. The estimate decides which configurations are worth compiling, and stands where there
is no compiler (GPUs).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.distributed import bytes_per_device, fully_sharded, parameter_specs
from jaxrl_llm.distributed.cost import Cost
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import MAX_LOGITS
from jaxrl_llm.models.placement import DATA, EXPERT, FSDP, SAMPLED_ROWS, SEQUENCE, TENSOR, row_shards
from jaxrl_llm.needs import value_of
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.plan_shapes import StateShapes, bytes_on_a_device
from jaxrl_llm.sampling.cache import columns, eight_bit
from jaxrl_llm.sampling.prefill import PREFILL_TOKENS
from jaxrl_llm.sampling.schedule import Size
from jaxrl_llm.shapes import bucket

# Temporaries of one layer's backward pass, in arrays of a token: of hidden states, of inner units, of heads, and of
# attention logits in float32.
HIDDEN, INNER, HEADS, LOGITS = 12, 6, 6, 1


class Held(NamedTuple):
    """Bytes on a device of what a run keeps there, and numbers of parameters there."""

    parameters: int
    frozen: int
    optimiser: int
    reference: int
    learning: int  # numbers, not bytes
    sampler: int  # beside the others while sampling


class Arithmetic(NamedTuple):
    """What is known of a configuration without compiling: as in `plan.Plan`."""

    held: dict[str, int]
    phases: dict[str, dict[str, int]]
    costs: dict[str, Cost]

    @property
    def peak(self) -> int:
        """The most bytes on a device."""
        return sum(self.held.values()) + max(sum(parts.values()) for parts in self.phases.values())


def held_bytes(shapes: StateShapes, mesh: AbstractMesh, reference_memory: str = "device") -> Held:
    """What is kept on each device of a mesh, exactly; for the sampler's weights without padding."""
    model, state = shapes.policy.config, shapes.state

    def on_a_device(tree: Any, dtype: Any = None) -> int:
        places = fully_sharded(tree, model, mesh)
        put = lambda x, place: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place)  # noqa: E731
        return bytes_on_a_device(jax.tree.map(put, tree, places))

    decoder = {
        name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, shapes.policy.dtype), x)
        for name, x in shapes.params.items() if name != "critic"
    }  # fmt: skip
    specs = parameter_specs(model, mesh, True, decoder)  # of the sampler: over "expert" and "tensor", on any hosts
    return Held(
        on_a_device(state.params),
        on_a_device(shapes.frozen),
        on_a_device(state.optimizer) + on_a_device(state.step),
        on_a_device(shapes.copied_reference) if reference_memory == "device" else 0,
        on_a_device(state.params, jnp.dtype(jnp.int8)),
        bytes_per_device(decoder, {name: specs[name] for name in decoder}, mesh),
    )


def arithmetic(
    config: TrainConfig, model: ModelConfig, algorithm: Algorithm, mesh: AbstractMesh, held: Held,
    engines: tuple[Size, Size | None], hosts: int = 1, ratio: float = 1.0, platform: str = "cpu",
) -> Arithmetic:  # fmt: skip
    """The plan of a configuration on a mesh.

    held: see `held_bytes`. engines: of a host, see `engine_sizes`. ratio: by which to multiply the update's
    temporaries. platform: of the devices.
    """
    shards, tensor, (size, evaluation) = row_shards(mesh), mesh.shape.get(TENSOR, 1), engines
    own = sampled_shards(mesh, hosts)
    states = config.dtype if config.activations == "dtype" else config.activations
    item, held = jnp.dtype(states).itemsize, held._replace(sampler=sampler_bytes(config, model, held, mesh))
    shares = mesh.size == 1 and config.dtype == config.param_dtype == "float32" and config.weight_dtype == "dtype"
    sampler = 0 if shares else held.sampler
    working = 2**28 + held.sampler // 50
    if platform == "tpu" and config.dtype == "float32":
        working += held.sampler // 2  # products read bfloat16, of which decoding makes a copy before its first step
    if config.sampling.truncating:
        working += 3 * 4 * size.shape.rows // own * model.vocab_size
    caches = {"sampling": cache_bytes(config.sampling.cache_dtype, model, size, own, tensor)}
    if evaluation is not None:
        caches["evaluation"] = cache_bytes(states, model, evaluation, own, tensor)
    phases = {
        name: {"sampler's weights": sampler, "caches": cached, "temporaries": working}
        for name, cached in caches.items()
    }
    tokens = slice_tokens(config, shards) // mesh.shape.get(SEQUENCE, 1)
    batch = config.prompts_per_step * config.group_size // shards * length_of(config) * 64
    temporaries = int(ratio * update_temporaries(config, model, held, tokens, mesh, item))
    phases["update"] = {"batch": batch, "temporaries": temporaries}
    kept = {"parameters": held.parameters, "frozen": held.frozen, "optimiser": held.optimiser}
    costs = costs_of(config, model, algorithm, mesh, held, caches["sampling"], size, own)
    return Arithmetic({**kept, "reference": held.reference, "padding": 0}, phases, costs)


def sampler_bytes(config: TrainConfig, model: ModelConfig, held: Held, mesh: AbstractMesh) -> int:
    """Bytes on a device of the sampler's weights: projections of layers are one a number where they are rounded."""
    if config.weight_dtype == "dtype":
        return held.sampler
    attention, mlp = model_weights(model)
    numbers = (attention + mlp / mesh.shape.get(EXPERT, 1)) / mesh.shape.get(TENSOR, 1)
    return int(held.sampler - (jnp.dtype(config.dtype).itemsize - 1) * numbers)


def sampled_shards(mesh: AbstractMesh, hosts: int = 1) -> int:
    """Slices of a host's rows while it samples."""
    return max(row_shards(mesh, SAMPLED_ROWS) // hosts, 1)


def length_of(config: TrainConfig) -> int:
    """Positions of the batch's rows."""
    return bucket(config.max_prompt_tokens + config.max_new_tokens)


def slice_tokens(config: TrainConfig, shards: int) -> int:
    """Packed tokens of a micro-batch on a device: each prompt once."""
    groups = -(-config.prompts_per_step // (config.minibatches * config.micro_batches * shards))
    return groups * (
        bucket(config.max_prompt_tokens) + config.group_size * bucket(config.max_new_tokens, least=16, per_octave=2)
    )


def cache_bytes(dtype: Any, model: ModelConfig, size: Size, shards: int, tensor: int) -> int:
    """Bytes on a device of an engine's caches."""
    item, heads = jnp.dtype(dtype).itemsize, model.num_kv_heads
    each = 2 * (model.head_dim * item + (4 if eight_bit(dtype) else 0))
    of_rows = sum(
        size.shape.prompts * columns(model, layer, size.width) + size.shape.rows * columns(model, layer, size.tokens)
        for layer in range(model.num_layers)
    )
    split = shards * (tensor if heads % tensor == 0 else 1)
    drawn = size.shape.rows * size.tokens * 20 + size.shape.prompts * model.hidden_size * item
    return of_rows * heads * each // split + drawn // shards


def update_temporaries(
    config: TrainConfig, model: ModelConfig, held: Held, tokens: int, mesh: AbstractMesh, item: int
) -> int:  # fmt: skip
    """Bytes on a device: gradients and their sums, what is saved of each layer, and one layer's backward pass.

    tokens: of a micro-batch.
    """
    tensor, expert = mesh.shape.get(TENSOR, 1), mesh.shape.get(EXPERT, 1)
    gradients = held.learning * (jnp.dtype(config.param_dtype).itemsize + (4 if config.micro_batches > 1 else 0))
    if config.lora_rank:
        gradients = held.learning * 8
    D, heads = model.hidden_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim / tensor
    times = max(model.experts_per_token, 1)
    inner = times * model.intermediate_size / tensor
    states = HIDDEN * D + (2 * times * D if times > 1 else 0) + INNER * inner + HEADS * heads
    if config.remat and not config.keep_projections:
        saved = model.num_layers * D * item / tensor
    elif config.remat:
        saved = model.num_layers * (2 * D + 3 * inner + heads) * item
    else:
        saved = model.num_layers * states * item
    keys = config.max_prompt_tokens + config.max_new_tokens
    logits = LOGITS * min(4 * tokens * keys * model.num_heads / tensor, 4 * max(MAX_LOGITS, tokens * 128))
    attention, mlp = model_weights(model)
    layer = (attention + mlp / expert) / model.num_layers / tensor * item
    exchanged = 2 * (expert - 1) * D * item  # of the other devices' tokens, and what they get back
    vocabulary = model.vocab_size * D * item / tensor
    return int(gradients + tokens * (saved + states * item + exchanged) + logits + 3 * layer + vocabulary)


def model_weights(model: ModelConfig) -> tuple[int, int]:
    """Numbers in all layers' matrices: of attention, and of the MLP with all its experts."""
    D, h, n = model.hidden_size, model.head_dim, model.num_layers
    attention = n * 2 * D * h * (model.num_heads + model.num_kv_heads)
    return attention, n * 3 * D * model.intermediate_size * max(model.num_experts, 1)


def costs_of(
    config: TrainConfig, model: ModelConfig, algorithm: Algorithm, mesh: AbstractMesh, held: Held, caches: int,
    size: Size, own: int,
) -> dict[str, Cost]:  # fmt: skip
    """Operations, bytes and collectives of each program on a device. own: slices of a host's rows.

    Operations of a forward pass: 2 for each weight of a matrix that a token meets, and 4 for each key that it attends
    to in each head. The update makes three passes, four where layers are recomputed.
    """
    shards = row_shards(mesh)
    fsdp, expert, sequence, tensor = (mesh.shape.get(axis, 1) for axis in (FSDP, EXPERT, SEQUENCE, TENSOR))
    P, T, G, prompts = config.max_prompt_tokens, config.max_new_tokens, config.group_size, config.prompts_per_step
    item, D, n = jnp.dtype(config.dtype).itemsize, model.hidden_size, model.num_layers
    attention, mlp = model_weights(model)
    active = attention + mlp * max(model.experts_per_token, 1) // max(model.num_experts, 1)
    pair, head = 4 * n * model.num_heads * model.head_dim, 2 * D * model.vocab_size
    padded = -(-prompts // shards) * shards / prompts  # devices without a prompt of their own wait
    forward = padded * prompts * (
        2 * active * (P + G * T) + pair * (P * P / 2 + G * (T * P + T * T / 2)) + head * G * T
    )  # fmt: skip
    reduced = 2 * (tensor - 1) / tensor * n * 2 * D * item  # of a token in a forward pass
    tokens = slice_tokens(config, shards) // sequence * config.micro_batches * config.minibatches
    weights = (attention + mlp / expert + head // 2) / tensor * item
    # Of a token: among devices with other experts, there and back; and of its heads along "sequence".
    routed = 2 * (expert - 1) * n * D * item
    heads = 2 * (model.num_heads + math.lcm(model.num_kv_heads, sequence)) / tensor * n * model.head_dim * item
    exchanged = routed + heads * (sequence - 1) / sequence
    gathered = weights * (fsdp - 1) / fsdp * config.micro_batches * config.minibatches
    gradient = 4 * held.learning * 2 * (mesh.size // (tensor * fsdp) - 1) / max(mesh.size // (tensor * fsdp), 1)
    passes = 4 if config.remat else 3
    state = held.parameters + held.optimiser

    def cost(name: str, flops: float, traffic: float, **sent: float) -> Cost:
        collectives = {kind.replace("_", "-"): int(size) for kind, size in sent.items() if size >= 1}
        return Cost(name, 0, 0, 0, 0, flops, int(traffic), collectives, 0, {})

    def learning(name: str, passes: int, times: int, gradients: float, updates: float) -> Cost:
        return cost(
            name, times * passes * forward / mesh.size,
            times * (passes * (gathered + weights + 20 * n * D * item * tokens) + 3 * updates),
            all_reduce=times * (passes * reduced * tokens + gradients), all_gather=times * min(passes, 3) * gathered,
            all_to_all=times * passes * exchanged * tokens,
            reduce_scatter=times * gathered * (4 / item) * (gradients > 0 or updates > 0),
        )  # fmt: skip

    rows, asked = size.shape.rows / own, min(max(PREFILL_TOKENS // size.width, 1), -(-size.shape.prompts // own))
    per_step = rows * reduced
    found = {
        "convert": cost("convert", 0, 2 * held.sampler, all_gather=held.sampler * (fsdp - 1) / fsdp),
        "prefill": cost(
            "prefill", asked * size.width * 2 * active / tensor, held.sampler, all_reduce=asked * size.width * reduced
        ),
        "decode": cost(
            "decode", rows * (2 * active + head + pair * (P + T / 2)) / tensor, held.sampler + caches,
            all_reduce=per_step,
        ),
    }  # fmt: skip
    forwards = {value_of(need)[0] for need in algorithm.needs} & {"old_logp", "values", "reference_logp"}
    for number in range(bool(forwards - {"reference_logp"}) + ("reference_logp" in forwards)):
        found[f"outputs_of {number + 1}" if number else "outputs_of"] = learning("outputs_of", 1, 1, 0, 0)
    found["update"] = learning("update", passes, config.epochs, gradient, state)
    return found


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices; an axis of one device is left out where `make_mesh` does."""
    kept = {name: size for name, size in sizes.items() if size > 1 or name in (DATA, TENSOR)}
    return AbstractMesh(tuple(kept.values()), tuple(kept))
