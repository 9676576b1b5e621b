"""The arrays of a run without the run: its method, its model by configuration alone, its shapes and shardings."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.reference import REFERENCE, Snapshots
from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.distributed import ahead_of_time, check_mesh, mesh_of, sampling_mesh_of
from jaxrl_llm.distributed.chips import Topology
from jaxrl_llm.distributed.hosts import of_this_host, units_of
from jaxrl_llm.learner.setup import shard
from jaxrl_llm.learner.step import Learner
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers
from jaxrl_llm.learner.train_state import TrainState, init_state
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.io.adapter_params import adapter_params
from jaxrl_llm.models.io.adapters import open_adapter
from jaxrl_llm.models.kinds import path_of
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.outputs.soft_thinking import check_thinking
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Policy, init_params
from jaxrl_llm.models.stacks import map_kinds
from jaxrl_llm.plan.models import Weights, config_of, model_bytes, reward_model_weights, teacher_weights
from jaxrl_llm.plan.sampling_programs import Arrays, engine_arrays
from jaxrl_llm.sampling.capacity import Size, for_conversations, lasting
from jaxrl_llm.sampling.capacity import plan as slots_for
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import balance_of, check_method, optimizer_of, with_routing
from jaxrl_llm.training.other_policies.reference import first_policies, wants_reference
from jaxrl_llm.training.other_policies.teacher import URLS, teachers_of
from jaxrl_llm.training.rollout import hook_of, rollout_of, strategy_of
from jaxrl_llm.training.run_model import keep_of, remat_of, split_parameters, with_critic, with_precision
from jaxrl_llm.utils.errors import InputError


class RunShapes(NamedTuple):
    """What stays constant over a run, as shapes with shardings."""

    config: TrainConfig
    topology: Topology
    learner: Learner  # `reference` and `frozen` are shapes
    state: TrainState
    sampler: Mesh  # the devices of the mesh, as tokens are sampled on them
    size: Size  # of the engine that samples
    evaluation: Size | None  # of the one that evaluates

    @property
    def mesh(self) -> Mesh:
        return self.learner.mesh

    @property
    def own(self) -> Mesh:
        """The devices of the first host, or unit of hosts, that samples on its own."""
        return self.topology.alone(of_this_host(self.sampler))

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    @property
    def params(self) -> Any:
        """Of the policy: those that learn and those that are frozen."""
        return combine(self.learner.frozen, self.state.params)

    @property
    def copied_reference(self) -> Any:
        """The reference policy, where it is a copy of its own."""
        return self.learner.reference if self.learner.frozen is None else None

    def engine(self, size: Size | None = None) -> Arrays:
        """The weights and caches of sampling, or of another engine."""
        sampling = self.config.sampling
        dtype, kind = self.policy.activation_dtype, None
        if size is None:
            dtype, kind = jnp.dtype(sampling.cache_dtype), sampling.weight_dtype
        record = size is None and records(self.learner.algorithm, self.policy.config)
        return engine_arrays(self.policy, self.params, self.sampler, size or self.size, dtype, self.own, kind, record)


def records(algorithm: Algorithm, model: ModelConfig) -> bool:
    """Whether rollouts record the experts of tokens."""
    return algorithm.routing == "rollout" and model.num_experts > 0


def plan_inputs(
    config: TrainConfig, topology: Topology, model: ModelConfig | None = None
) -> tuple[Mesh, Mesh, Algorithm, ModelConfig]:
    """The mesh of a run, that to sample on, its method and its model. model: instead of the configured one.

    Raises InputError for what the run would raise before it loads its model's weights.
    """
    mesh = mesh_of(config.mesh, topology.devices)
    sampler = sampling_mesh_of(config.sampling_mesh, mesh)
    algorithm = check_method(config, mesh)
    if (hook := hook_of(config, algorithm)) is not None and hook.other is not None:  # tokens are drawn with its logits
        raise InputError(
            f"jaxrl plan knows runs of one policy, but {config.algorithm} runs a second one beside it: plan ppo, and "
            "add its weights, its caches and its forward passes once more"
        )
    if config.teacher is not None and config.teacher.startswith(URLS):
        raise InputError(
            f"jaxrl plan knows teachers on the run's own devices, but {config.teacher} is a server: plan grpo, which "
            "has the same policy and no teacher"
        )
    model = model or config_of(config.model, config.sink_slots)
    if model.unmasking is not None:
        raise InputError(
            f"jaxrl plan knows models that predict the next token, but {config.model} is a masked-diffusion model: "
            "plan a Llama of its size, whose weights are as many, and add forward passes of all rows for each block"
        )
    algorithm = with_routing(config, algorithm, model)
    check_mesh(model, mesh)
    check_mesh(model, sampler, "the sampling mesh")
    of_this_host(sampler)  # raises InputError where hosts have different numbers of devices
    return mesh, sampler, algorithm, model


def shapes_of(config: TrainConfig, topology: Topology, model: ModelConfig | None = None) -> RunShapes:
    """The shapes of a run on a topology; see `plan_inputs`."""
    mesh, sampler, algorithm, model = plan_inputs(config, topology, model)
    found = state_shapes(config, model, algorithm)
    policy = found.policy
    policy = dataclasses.replace(policy, mesh=mesh) if mesh.size > 1 else policy
    if (thinking := rollout_of(config, algorithm).thinking) is not None:
        check_thinking(thinking, model)
        policy = dataclasses.replace(policy, thinking=dataclasses.replace(thinking, end=0))  # any token serves
    optimizer = optimizer_of(config, algorithm)
    with ahead_of_time():
        frozen, reference, state, policies = (
            shard(tree, policy, mesh) for tree in (found.frozen, found.reference, found.state, found.policies)
        )
    learner = Learner(
        policy, algorithm, optimizer, mesh, config.epochs, config.minibatches, config.micro_batches, reference, frozen,
        policies, balance_of(config), teacher_shapes(config, policy, mesh),
    )  # fmt: skip
    devices = row_shards(of_this_host(sampler), SAMPLED_ROWS)
    sizes = engine_sizes(config, algorithm, devices, units_of(sampler), policy.config.max_positions)
    return RunShapes(config, topology, learner, state, sampler, *sizes)


def teacher_shapes(config: TrainConfig, policy: Policy, mesh: Mesh) -> FrozenPolicy | Teachers | None:
    """The run's teachers as shapes on the mesh; None where it has none."""
    found = []
    for model, weights in teacher_weights(config):
        check_mesh(model, mesh)
        own = dataclasses.replace(policy, config=model, critic=None, hook=None, thinking=None, population=None)
        with ahead_of_time():
            found.append(FrozenPolicy(own, shard(weights, own, mesh)))
    if names := teachers_of(config.teacher):
        return Teachers(tuple(names), tuple(found))
    return found[0] if found else None


class StateShapes(NamedTuple):
    """What a run trains and keeps, as shapes without shardings."""

    policy: Policy
    state: TrainState
    frozen: Any  # the parameters that never learn; None where all do
    reference: Any  # of a reference policy; with adapters the frozen parameters
    params: Any  # of the policy, all together
    policies: Mapping[str, Any]  # that move beside it, but for the reference
    engines: int = 1  # that sample at a time, each with weights and caches of its own
    rewards: Weights = ()  # of reward models
    teachers: Weights = ()

    @property
    def copied_reference(self) -> Any:
        """The reference policy, where it is a copy of its own."""
        return self.reference if self.frozen is None else None


def state_shapes(config: TrainConfig, model: ModelConfig, algorithm: Algorithm) -> StateShapes:
    """The shapes of a run's state."""
    made: dict[str, Policy] = {}

    def parameters() -> Any:
        policy = with_precision(config, Policy(model, jnp.dtype(config.dtype), remat_of(config)))
        params = init_params(jax.random.key(0), model, jnp.dtype(config.param_dtype))
        if (keep := keep_of(config)) is not None:
            params["layers"] = map_kinds(lambda own: {name: keep(name, x) for name, x in own.items()}, params["layers"])
        if config.adapter:
            adapter = open_adapter(path_of(config.adapter, "adapter"), model)
            params = combine(params, jax.tree.map(jnp.asarray, adapter_params(adapter)))
        made["policy"], params = with_critic(config, algorithm.needs, policy, params)
        return params, split_parameters(config, made["policy"], params)

    params, (frozen, learning) = jax.eval_shape(parameters)
    reference = None
    if wants_reference(config, algorithm):
        own = without_critic(params)
        reference = own if frozen is None or config.adapter else frozen
    state = jax.eval_shape(partial(init_state, optimizer=optimizer_of(config, algorithm)), learning)
    demands, hook = rollout_of(config, algorithm).demands, hook_of(config, algorithm)
    moving = jax.eval_shape(partial(first_policies, config, algorithm, hook, league=demands.league), learning)
    both = algorithm.reference is not None and algorithm.reference.initial_share  # one that stays and one that moves
    policies = {name: tree for name, tree in moving.items() if both or name != REFERENCE}
    if isinstance(several := moving.get(REFERENCE), Snapshots):
        policies["snapshots"] = several.policies[1:]  # one of them is the reference above
    weights = reward_model_weights(config), teacher_weights(config)
    whole = combine(frozen, learning)
    return StateShapes(made["policy"], state, frozen, reference, whole, policies, demands.engines, *weights)


Sizes = tuple[Size, Size | None]  # of the engines of a step and of an evaluation


def engine_sizes(config: TrainConfig, algorithm: Algorithm, devices: int, hosts: int = 1, context: int = 0) -> Sizes:
    """The engine of a step, with prompts and completions as long as the settings allow, and that of an evaluation.

    devices: of a host, over which rows are sharded. hosts: each with an engine for its share of the prompts. context:
    tokens of the model's context; 0: unlimited.
    """
    strategy, G = strategy_of(config, algorithm), config.group_size
    rows, slots = -(-config.prompts_per_step * G // hosts), -(-config.slots // hosts)
    rollout, parked = rollout_of(config, algorithm), 0
    if strategy is None and rollout.converses:
        prompts = -(-config.prompts_per_step // hosts)
        shape, parked = for_conversations(slots, G, prompts, devices, rollout.demands.turns == 1)
    elif strategy is None:
        own = range(-(-config.prompts_per_step // hosts))
        shape = slots_for([number for number in own for _ in range(G)], slots, devices)
    else:
        flight = -(-strategy.in_flight(config.prompts_per_step) // hosts)
        shape = lasting(slots or rows, flight, G, devices)
    width, tokens = bucket(config.max_prompt_tokens), bucket(config.max_new_tokens, least=4)
    size = Size(shape, width, max(tokens, rollout.room(config.max_new_tokens, context)), parked)
    if not config.eval_size:
        return size, None
    return size, Size(slots_for(range(-(-config.eval_size // hosts)), slots or rows, devices), width, tokens)


def bytes_on_a_device(tree: Any) -> int:
    """Of shapes that have shardings."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def held_by(shapes: RunShapes) -> dict[str, int]:
    """Bytes on each device of what a run keeps there all the time."""
    state, reference = shapes.state, shapes.copied_reference
    return {
        "parameters": bytes_on_a_device(state.params),
        "frozen": bytes_on_a_device(shapes.learner.frozen),
        "optimiser": bytes_on_a_device(state[1:]),  # with the counter of steps
        "reference": bytes_on_a_device(shapes.learner.policies)
        + (bytes_on_a_device(reference) if shapes.config.reference_memory == "device" else 0),
        "rewards": model_bytes(reward_model_weights(shapes.config), shapes.mesh),
        "teachers": model_bytes(teacher_weights(shapes.config), shapes.mesh),
    }
