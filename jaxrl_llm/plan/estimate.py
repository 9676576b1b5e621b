"""A plan by arithmetic, in milliseconds: what is held is exact, temporaries are estimated.

What was compiled for v5e took 0.71 times (Qwen3-8B) and 1.06 times (Qwen3.5-9B, both fsdp=4,tensor=4) the temporaries
of the update that are estimated; on chips with more memory to use the compiler takes more, and the search multiplies
them. The estimate decides which configurations are worth compiling, and stands where there is no compiler (GPUs).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import OF_TEACHER, value_of
from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.distributed import fully_sharded
from jaxrl_llm.distributed.chips import GIB, Topology
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import MAX_LOGITS
from jaxrl_llm.models.mesh_axes import EXPERT, FSDP, SEQUENCE, TENSOR, row_shards
from jaxrl_llm.plan.full_batch import as_trained
from jaxrl_llm.plan.models import model_bytes, teacher_models
from jaxrl_llm.plan.program.cost import Cost
from jaxrl_llm.plan.sampling import Sampling, active_weights, estimate, matrix_sizes, pair_operations, reduced_bytes
from jaxrl_llm.plan.shapes import RunShapes, StateShapes, bytes_on_a_device
from jaxrl_llm.training.config import TrainConfig

# Temporaries of one layer's backward pass, in arrays of a token: of hidden states, of inner units, of heads, and of
# attention logits in float32.
HIDDEN, INNER, HEADS, LOGITS = 12, 6, 6, 1


class HeldBytes(NamedTuple):
    """Bytes on a device of what a run keeps there, and numbers of parameters there."""

    parameters: int
    frozen: int
    optimiser: int
    reference: int  # with a second policy that is run beside the first, the last update's weights and a target critic
    rewards: int  # models among them
    teachers: int
    learning: int  # numbers, not bytes

    @property
    def kept(self) -> int:
        """Bytes that are there all the time."""
        return self.parameters + self.frozen + self.optimiser + self.reference + self.rewards + self.teachers


class Arithmetic(NamedTuple):
    """What is known of a configuration without compiling: as in `plan.Plan`."""

    held: dict[str, int]
    phases: dict[str, dict[str, int]]
    costs: dict[str, Cost]

    @property
    def peak(self) -> int:
        """The most bytes on a device."""
        return sum(self.held.values()) + max(sum(parts.values()) for parts in self.phases.values())


def held_bytes(shapes: StateShapes, mesh: AbstractMesh, reference_memory: str = "device") -> HeldBytes:
    """What is kept on each device of a mesh, exactly."""
    model, state = shapes.policy.config, shapes.state

    def on_a_device(tree: Any, dtype: Any = None) -> int:
        places = fully_sharded(tree, model, mesh)

        def placed(x: Any, place: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place)

        return bytes_on_a_device(jax.tree.map(placed, tree, places))

    return HeldBytes(
        on_a_device(state.params),
        on_a_device(shapes.frozen),
        on_a_device(state.optimizer) + on_a_device(state.step),
        on_a_device(shapes.policies) + (on_a_device(shapes.copied_reference) if reference_memory == "device" else 0),
        model_bytes(shapes.rewards, mesh),
        model_bytes(shapes.teachers, mesh),
        on_a_device(state.params, jnp.dtype(jnp.int8)),
    )


def arithmetic(
    config: TrainConfig, model: ModelConfig, algorithm: Algorithm, mesh: AbstractMesh, held: HeldBytes,
    sampling: Sampling, ratio: float = 1.0,
) -> Arithmetic:  # fmt: skip
    """The plan of a configuration on a mesh.

    held: see `held_bytes`. sampling: on the same devices. ratio: by which to multiply the update's temporaries.
    """
    config = as_trained(config, algorithm)  # all that follows is of learning
    shards = row_shards(mesh)
    states = config.dtype if config.activations == "dtype" else config.activations
    item, phases = jnp.dtype(states).itemsize, dict(sampling.phases)
    tokens = slice_tokens(config, shards) // mesh.shape.get(SEQUENCE, 1)
    batch = config.prompts_per_step * config.group_size // shards * length_of(config) * 64
    temporaries = int(ratio * update_temporaries(config, model, held, tokens, mesh, item))
    phases["update"] = {"batch": batch, "temporaries": temporaries}
    kept = {"parameters": held.parameters, "frozen": held.frozen, "optimiser": held.optimiser}
    copied, fsdp = sampling.phases["sampling"]["sampler's weights"], mesh.shape.get(FSDP, 1)
    convert = estimate("convert", 0, 2 * copied, all_gather=copied * (fsdp - 1) / fsdp)
    costs = {"convert": convert} | sampling.costs | learning_costs_of(config, model, algorithm, mesh, held)
    beside = {"reference": held.reference, "rewards": held.rewards, "teachers": held.teachers, "padding": 0}
    return Arithmetic({**kept, **beside}, phases, costs)


def length_of(config: TrainConfig) -> int:
    """Positions of the batch's rows."""
    return bucket(config.max_prompt_tokens + config.max_new_tokens)


def slice_tokens(config: TrainConfig, shards: int) -> int:
    """Packed tokens of a micro-batch on a device: each prompt once."""
    groups = -(-config.prompts_per_step // (config.minibatches * config.micro_batches * shards))
    completion = bucket(config.max_new_tokens, least=16, per_octave=2)
    return groups * (bucket(config.max_prompt_tokens) + config.group_size * completion)


def update_temporaries(
    config: TrainConfig, model: ModelConfig, held: HeldBytes, tokens: int, mesh: AbstractMesh, item: int
) -> int:  # fmt: skip
    """Bytes on a device: gradients and their sums, what is saved of each layer, and one layer's backward pass.

    tokens: of a micro-batch.
    """
    tensor, expert = mesh.shape.get(TENSOR, 1), mesh.shape.get(EXPERT, 1)
    gradients = held.learning * (jnp.dtype(config.param_dtype).itemsize + (4 if config.micro_batches > 1 else 0))
    if config.adapts:
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
    others, experts = matrix_sizes(model)
    layer = (others + experts / expert) / model.num_layers / tensor * item
    exchanged = 2 * (expert - 1) * D * item  # of the other devices' tokens, and what they get back
    vocabulary = model.vocab_size * D * item / tensor
    return int(gradients + tokens * (saved + states * item + exchanged) + logits + 3 * layer + vocabulary)


def learning_costs_of(
    config: TrainConfig, model: ModelConfig, algorithm: Algorithm, mesh: AbstractMesh, held: HeldBytes
) -> dict[str, Cost]:
    """Operations, bytes and collectives of each program of learning on a device. The update makes three passes, four
    where layers are recomputed."""
    fsdp, tensor = (mesh.shape.get(axis, 1) for axis in (FSDP, TENSOR))
    gradient = 4 * held.learning * 2 * (mesh.size // (tensor * fsdp) - 1) / max(mesh.size // (tensor * fsdp), 1)
    learning, teachers = passes_of(config, model, mesh), teacher_models(config.teacher)
    needs = {value_of(need)[0] for need in algorithm.needs}
    reference = {"reference_logp", *(() if teachers else OF_TEACHER)}
    policies = bool(needs & {"old_logp", "values", "top_tokens"}), bool(needs & reference), "previous_logp" in needs
    forward = [learning] * sum(policies) + [passes_of(config, teacher, mesh) for teacher in teachers]
    found = {
        f"outputs_of {number + 1}" if number else "outputs_of": one("outputs_of", 1, 1, 0, 0)
        for number, one in enumerate(forward)
    }
    state = held.parameters + held.optimiser
    found["update"] = learning("update", 4 if config.remat else 3, config.epochs, gradient, state)
    return found


def passes_of(config: TrainConfig, model: ModelConfig, mesh: AbstractMesh) -> Callable[..., Cost]:
    """The cost of (name, passes, times, bytes of gradients, bytes of updates) through a model, of a step's batch.

    Operations of a forward pass: 2 for each weight of a matrix that a token meets, and 4 for each key that it attends
    to in each head.
    """
    shards = row_shards(mesh)
    fsdp, expert, sequence, tensor = (mesh.shape.get(axis, 1) for axis in (FSDP, EXPERT, SEQUENCE, TENSOR))
    P, T, G, prompts = config.max_prompt_tokens, config.max_new_tokens, config.group_size, config.prompts_per_step
    item, D, n = jnp.dtype(config.dtype).itemsize, model.hidden_size, model.num_layers
    (others, experts), active = matrix_sizes(model), active_weights(model)
    pair, head = pair_operations(model), 2 * D * model.vocab_size
    padded = -(-prompts // shards) * shards / prompts  # devices without a prompt of their own wait
    forward = padded * prompts * (
        2 * active * (P + G * T) + pair * (P * P / 2 + G * (T * P + T * T / 2)) + head * G * T
    )  # fmt: skip
    reduced = reduced_bytes(model, tensor, item)
    tokens = slice_tokens(config, shards) // sequence * config.micro_batches * config.minibatches
    weights = (others + experts / expert + head // 2) / tensor * item
    # Of a token: among devices with other experts, there and back; and of its heads along "sequence".
    routed = 2 * (expert - 1) * n * D * item
    heads = 2 * (model.num_heads + math.lcm(model.num_kv_heads, sequence)) / tensor * n * model.head_dim * item
    exchanged = routed + heads * (sequence - 1) / sequence
    gathered = weights * (fsdp - 1) / fsdp * config.micro_batches * config.minibatches

    def cost(name: str, passes: int, times: int, gradients: float, updates: float) -> Cost:
        return estimate(
            name, times * passes * forward / mesh.size,
            times * (passes * (gathered + weights + 20 * n * D * item * tokens) + 3 * updates),
            all_reduce=times * (passes * reduced * tokens + gradients), all_gather=times * min(passes, 3) * gathered,
            all_to_all=times * passes * exchanged * tokens,
            reduce_scatter=times * gathered * (4 / item) * (gradients > 0 or updates > 0),
        )  # fmt: skip

    return cost


COPY = "weights while loading, or a checkpoint"
PROCESS = 1.2  # GiB of host memory that Python, JAX and the compiler take


def host_memory(config: TrainConfig, topology: Topology, arrays: RunShapes | StateShapes) -> dict[str, int]:
    """Bytes on each host: the process, the weights while they are loaded, a checkpoint while it is written."""
    hosts = topology.hosts
    reference = arrays.copied_reference if config.reference_memory == "host" else None
    length = config.max_prompt_tokens + config.max_new_tokens
    saved = -(-_bytes(arrays.state) // hosts) if config.checkpoint_every else 0
    return {
        "process": int(PROCESS * GIB),
        COPY: max(_bytes(arrays.params), saved),
        "reference": _bytes(reference) // hosts,
        "batch": config.prompts_per_step * config.group_size * length * 64,  # some fifteen arrays of 4 bytes a token
    }


def _bytes(tree: Any) -> int:
    """Of whole arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
