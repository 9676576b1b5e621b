"""What a run would need on a TPU slice: its own programs, compiled for the slice without one.

Memory is what the compiler says of these programs. Time is a lower bound: operations at the chips' peak, bytes at their
bandwidth, one after another; collectives are stated beside, as if nothing hid them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.distributed.cost import Cost, cost_of
from jaxrl_llm.distributed.mesh import ahead_of_time, mesh_of
from jaxrl_llm.distributed.sharding import check_mesh
from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.learner.learn import Learner, compile_learning, shard
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.update import init_state
from jaxrl_llm.models.config import ModelConfig, from_hf
from jaxrl_llm.models.kinds import read_json
from jaxrl_llm.models.load import DEMO_MODEL
from jaxrl_llm.models.placement import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.policy import Policy, init_params
from jaxrl_llm.needs import need_of, of_reference, value_of
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.setup import check_method, split_parameters, with_critic
from jaxrl_llm.sampling.ahead import compile_sampling
from jaxrl_llm.sampling.schedule import Size
from jaxrl_llm.sampling.schedule import plan as slots_for
from jaxrl_llm.sampling.weights import abstract_weights
from jaxrl_llm.shapes import bucket
from jaxrl_llm.trajectory import Trajectories

GIB = 2**30


class Chip(NamedTuple):
    """A chip's memory in GiB, bfloat16 TFLOP/s, and GB/s of its memory and of its links to others."""

    memory: float
    peak: float
    bandwidth: float
    links: float


# Of Google's pages on each TPU version.
CHIPS = {
    "v4": Chip(32, 275, 1228, 300),
    "v5e": Chip(16, 197, 819, 200),
    "v5p": Chip(95, 459, 2765, 600),
    "v6e": Chip(32, 918, 1640, 448),
}


class Plan(NamedTuple):
    """Bytes on each chip, and seconds of an iteration."""

    chip: Chip
    chips: int
    mesh: dict[str, int]
    held: dict[str, int]  # all the time: parameters, moments, reference ...
    sampling: dict[str, int]  # beside `held` while sampling
    learning: dict[str, int]  # beside `held` while learning
    costs: list[Cost]
    seconds: dict[str, float]

    @property
    def peak(self) -> int:
        """The most bytes on a chip."""
        return sum(self.held.values()) + max(sum(self.sampling.values()), sum(self.learning.values()))

    @property
    def fits(self) -> bool:
        return self.peak <= self.chip.memory * GIB


def config_of(model: str) -> ModelConfig:
    """The configuration of a model, whose weights need not be there: a folder, a config.json, a .gguf file, the demo
    model, or a name on the Hugging Face hub. InputError for anything else."""
    path = Path(model).expanduser()
    if model == DEMO_MODEL or model.endswith(".gguf"):
        from jaxrl_llm.models.gguf import read_gguf, smollm2_path

        file = smollm2_path() if model == DEMO_MODEL else path
        return from_hf(read_gguf(file).config, where=file.name)
    file = path if model.endswith(".json") else path / "config.json"
    if not file.exists() and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(model, "config.json"))
        except Exception as error:  # the hub's client raises several
            raise InputError(f"the hub gave no config.json of {model} ({type(error).__name__})") from None
    if not file.exists():
        raise InputError(f"{file} is not there: give a model's folder, its config.json, a .gguf file or a hub name")
    return from_hf(read_json(file), where=str(file))


def chips_of(topology: str, slices: int = 1) -> tuple[Chip, list[Any]]:
    """The chips of a topology such as "v5e:4x4", in one or several slices. InputError where libtpu knows it not."""
    version = topology.partition(":")[0]
    if version not in CHIPS:
        raise unknown("TPU version", version, CHIPS)
    options = {"num_slices": slices} if slices > 1 else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except Exception as error:  # JAX raises several, also where libtpu is missing
        said = str(error).strip().splitlines()[:1]
        raise InputError(
            f"cannot compile for {topology} ({': '.join([type(error).__name__, *said])}): it needs libtpu (pip install "
            "libtpu), TPU_SKIP_MDS_QUERY=1, and a topology such as v5e:4x4"
        ) from None
    return CHIPS[version], list(found.devices)


def full_batch(config: TrainConfig, algorithm: Algorithm, vocabulary: int) -> Trajectories:
    """A scored batch on the host in which every prompt and completion is as long as the settings allow."""
    G, P, T = config.group_size, config.max_prompt_tokens, config.max_new_tokens
    rows = config.prompts_per_step * G
    shape, group = (rows, P + T), np.arange(rows, dtype=np.int32) // G
    action = np.broadcast_to(np.arange(P + T) >= P, shape)
    tokens = np.random.default_rng(0).integers(0, vocabulary, shape, dtype=np.int32)
    tokens[:, :P] = tokens[group * G, :P]
    zeros = np.zeros(shape, np.float32)
    fields: dict[str, Any] = {
        "tokens": tokens, "token_mask": np.ones(shape, bool), "action_mask": action, "behaviour_logp": zeros - 1,
        "policy_step": np.zeros(shape, np.int32), "turn": np.where(action, 0, -1).astype(np.int32), "group": group,
        "prompt_id": group, "truncated": np.zeros(rows, bool), "temperature": np.ones(rows, np.float32),
        "reward": (np.arange(rows) % 2).astype(np.float32),
    }  # fmt: skip
    batch = Trajectories(**fields)
    for text in sorted(algorithm.needs):
        (_, number), need = value_of(text), need_of(text)
        if need.provider is not None and need.stand_in.value is not None:
            value: Any = np.asarray(need.stand_in.value(batch, number))
            batch = need.put(batch, value, number)
    return batch


def bytes_on_a_chip(tree: Any) -> int:
    """Of arrays that have shardings."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def plan(config: TrainConfig, topology: str, slices: int = 1) -> Plan:
    """Compile a run's programs for a TPU topology, and say what they need. InputError for what is not possible."""
    chip, devices = chips_of(topology, slices)
    mesh = mesh_of(config.mesh, devices)
    algorithm = check_method(config, mesh)
    model = config_of(config.model)
    check_mesh(model, mesh)
    policy = Policy(model, jnp.dtype(config.dtype), config.remat, mesh=mesh if mesh.size > 1 else None)
    made: dict[str, Policy] = {}

    def parameters() -> Any:
        params = init_params(jax.random.key(0), model, jnp.dtype(config.param_dtype))
        made["policy"], params = with_critic(config, algorithm, policy, params)
        return params, split_parameters(config, made["policy"], params)

    params, (frozen, learning) = jax.eval_shape(parameters)
    policy = made["policy"]
    reference = None
    if of_reference(algorithm.needs):
        reference = frozen or {name: x for name, x in params.items() if name != "critic"}
    optimizer = make_optimizer(config.optimizer, config.steps * config.epochs * config.minibatches)
    learner = Learner(
        policy, algorithm, optimizer, mesh, config.epochs, config.minibatches, config.micro_batches, reference, frozen
    )
    batch = full_batch(config, algorithm, model.vocab_size)
    costs = [cost_of(program) for program in compile_learning(learner, learning, batch)]
    prompts = [number for number in range(config.prompts_per_step) for _ in range(config.group_size)]
    size = Size(
        slots_for(prompts, config.slots, row_shards(mesh, SAMPLED_ROWS)), bucket(config.max_prompt_tokens),
        bucket(config.max_new_tokens, least=4),
    )  # fmt: skip
    sampling = config.sampling
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    engine = {
        name: cost_of(program)
        for name, program in compile_sampling(
            policy, params, mesh, size, cache_dtype=jnp.dtype(sampling.cache_dtype), filtered=filtered
        ).items()
    }
    with ahead_of_time():
        state = shard(jax.eval_shape(partial(init_state, optimizer=optimizer), learning), policy, mesh)
        kept = shard((frozen, reference if frozen is None else None), policy, mesh)
    sampler = bytes_on_a_chip(abstract_weights(policy, params, mesh))
    held = {
        "parameters": bytes_on_a_chip(state.params) + bytes_on_a_chip(kept[0]),
        "optimiser": bytes_on_a_chip(state[1:]),
        "reference": bytes_on_a_chip(kept[1]) if config.reference_memory == "device" else 0,
    }
    update = costs[-1]
    given = held["parameters"] + held["optimiser"]
    return Plan(
        chip, len(devices), dict(mesh.shape), held,
        {
            "sampler's weights": sampler,
            "caches": max(engine["decode"].arguments - sampler, 0),
            "temporaries": max(cost.temporaries + cost.results for cost in engine.values()),
        },
        {
            "batch": max(update.arguments - given, 0),
            "temporaries": max(cost.temporaries + cost.results for cost in costs),
        },
        [*engine.values(), *costs],
        seconds_of(config, model, chip, mesh.shape, sampler, engine["decode"], costs),
    )  # fmt: skip


def seconds_of(
    config: TrainConfig, model: ModelConfig, chip: Chip, mesh: Mapping[str, int], sampler: int, decode: Cost,
    costs: list[Cost],
) -> dict[str, float]:  # fmt: skip
    """Seconds of an iteration's parts at the chips' peak and bandwidth; "collectives" of learning, if nothing hid them.

    Operations of a pass: 2 for each weight of a matrix that a token meets, and 4 for each key that it attends to in
    each layer's heads. The update makes three passes, four where layers are recomputed; a reference and old
    log-probabilities one each. A decode step reads the sampler's weights and half of the caches.
    """
    chips = math.prod(mesh.values())
    P, T, G, prompts = config.max_prompt_tokens, config.max_new_tokens, config.group_size, config.prompts_per_step
    D, h = model.hidden_size, model.head_dim
    heads, groups = model.num_heads, model.num_kv_heads
    inner = model.intermediate_size * max(model.experts_per_token, 1)
    weights = model.num_layers * (D * h * (2 * heads + 2 * groups) + 3 * D * inner)
    seen = prompts * (P * P / 2 + G * (T * P + T * T / 2))  # pairs of a token and a key
    tokens = prompts * (P + G * T)
    forward = (
        2 * weights * tokens + 4 * model.num_layers * heads * h * seen + 2 * D * model.vocab_size * prompts * G * T
    )
    passes = (4 if config.remat else 3) * config.epochs
    passes += sum(cost.name == "outputs_of" for cost in costs)
    rate = chips * chip.peak * 1e12
    rows = prompts * G
    rounds = math.ceil(rows / (config.slots or rows))
    step = (sampler + max(decode.arguments - sampler, 0) / 2) / (chip.bandwidth * 1e9)
    moved = sum(sum(cost.collectives.values()) for cost in costs)
    return {
        "prefill": (2 * weights * prompts * P + 2 * model.num_layers * heads * h * prompts * P * P) / rate,
        "decode": rounds * T * step,
        "learning": passes * forward / rate,
        "collectives": moved / (chip.links * 1e9),
    }
