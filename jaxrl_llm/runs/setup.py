"""Set-up of a run from its configuration: the method, the model, the prompts, the rewards, the optimiser."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.algorithms import Algorithm, constructor, get, with_facts
from jaxrl_llm.algorithms.unfinished import check_needs, check_whole, going_without, names_in, provided_by_rewards
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed import check_mesh, check_rows, fully_sharded, mesh_of
from jaxrl_llm.distributed.hosts import ALONE, Hosts, all_hosts
from jaxrl_llm.distributed.mesh import to_host
from jaxrl_llm.distributed.on_hosts import in_units
from jaxrl_llm.errors import InputError, gather, unknown
from jaxrl_llm.learner.learn import shard, start
from jaxrl_llm.learner.optimizer import learning_rate, make_optimizer
from jaxrl_llm.learner.update import TrainState
from jaxrl_llm.models import load_policy, lora
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.critic import Critic, init_critic
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.digest import tokenizer_digest
from jaxrl_llm.models.outputs import inner_policy
from jaxrl_llm.models.placement import row_shards
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.needs import of_reference, value_of, values_of
from jaxrl_llm.reporting import compare
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.shaping import soft_overlong_penalty
from jaxrl_llm.runs.checksums import checksums, structure
from jaxrl_llm.runs.code_digest import code_digest
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.inputs import Inputs, make_rewards, prompt_sets, split_prompts
from jaxrl_llm.runs.rollout import check_columns, check_rollout, rollout_of
from jaxrl_llm.signatures import hyperparameters
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import RunFacts, Transform, chain


class RunParts(NamedTuple):
    """Everything that stays constant over a run."""

    algorithm: Algorithm
    policy: Policy
    tokenizer: Any
    prompts: PromptSet
    held_out: PromptSet | None
    rewards: list[Reward]
    optimizer: optax.GradientTransformation
    rate: optax.Schedule
    digests: dict[str, str]  # of the inputs: prompts, reward files, the model
    reference: Params | None  # the initial weights, if the method needs them
    mesh: jax.sharding.Mesh
    frozen: Params | None = None  # the model's weights, if only adapters are trained
    hosts: Hosts = ALONE
    notes: tuple[str, ...] = ()  # what to say when the run starts


def make_algorithm(config: TrainConfig) -> Algorithm:
    """The configured method, built with what the run knows, after the soft overlong penalty if that is on.

    Needs that the run excludes (`without`) are dropped. Raises InputError for an unknown method or hyper-parameter, or
    a value out of range.
    """
    facts = {"max_length": config.max_new_tokens, "total_steps": config.steps}
    chosen = {name: value for name, value in config.hyperparameters.items() if name != "without"}
    given = with_facts(constructor(config.algorithm), chosen, learning_rate=config.optimizer.learning_rate, **facts)
    algorithm = going_without(get(config.algorithm, **given), _without(config))
    for need in algorithm.needs:
        value_of(need)  # raises InputError for a malformed need
    if not config.overlong_tokens:
        return algorithm
    penalty: Transform = soft_overlong_penalty(config.max_new_tokens, config.overlong_tokens)
    return dataclasses.replace(algorithm, transform=chain(penalty, algorithm.transform))


def _without(config: TrainConfig) -> tuple[str, ...]:
    """The parts and needs of its method that a run says it goes without."""
    return names_in(config.hyperparameters.get("without") or ())


def check_provided(config: TrainConfig, algorithm: Algorithm, provided: Iterable[str], by_name: bool = True) -> None:
    """InputError, naming what would provide it, where the method lacks a part or needs what the run does not provide.

    provided: by the run's source. by_name: the algorithm is the configured method, not another value.
    """
    if by_name:
        check_whole(config.algorithm, algorithm.needs, _without(config), provided)
    else:
        check_needs(algorithm.needs, provided)


def provided_by(config: TrainConfig, algorithm: Algorithm) -> set[str]:
    """The needs that the configured rollout and rewards provide. InputError for an unknown rollout."""
    return {*provided_by_rewards(config.rewards), *rollout_of(config, algorithm).provides}


def hyperparameters_of(config: TrainConfig) -> dict[str, Any]:
    """The method's hyper-parameters: those given, and the defaults of the others."""
    return {one.name: one.default for one in hyperparameters(config.algorithm)} | config.hyperparameters


def check_groups(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if a method compares the samples of a prompt but group_size is 1, so that it would learn nothing.

    Found by trying it: on four groups of one sample with different rewards, such a method has zero gradients.
    """
    if config.group_size > 1:
        of_sets = {name: value for name, value in hyperparameters_of(config).items() if name in ("k", "set_size")}
        for name, value in of_sets.items():
            if isinstance(value, int) and value > config.group_size:
                raise InputError(
                    f"{config.algorithm}: {name} is {value}, but must be at most group_size {config.group_size}"
                )
        return
    action, rows = jnp.ones((4, 3), bool), jnp.arange(4, dtype=jnp.int32)
    logp, zeros = -0.1 * (1 + jnp.arange(12.0).reshape(4, 3)), jnp.zeros((4, 3), jnp.int32)
    reward = jnp.asarray([0.0, 1.0, 0.5, 1.0])
    lone = Trajectories(
        tokens=zeros, token_mask=action, action_mask=action, behaviour_logp=logp, policy_step=zeros, turn=zeros,
        group=rows, prompt_id=rows, truncated=rows < 0, rewards={"probe": reward}, reward=reward,
        info={"greedy_reward": jnp.full(4, 0.25)},
    )  # fmt: skip
    if not np.any(compare(algorithm, lone).gradients["algorithm 1"]):
        raise InputError(
            f"{config.algorithm} compares the completions of a prompt with each other: group_size is 1, but must be at "
            "least 2"
        )


def needs_values(algorithm: Algorithm) -> bool:
    """Whether the method has a critic."""
    return any(value_of(need)[0] == "values" for need in algorithm.needs)


def with_critic(config: TrainConfig, algorithm: Algorithm, policy: Policy, params: Params) -> tuple[Policy, Params]:
    """The policy and its parameters with a critic, where the method needs one."""
    if not needs_values(algorithm):
        return policy, params
    heads = int(max(values_of(algorithm.needs, "values"), default=1))
    critic = Critic(kind=config.critic, heads=heads)
    policy = dataclasses.replace(policy, critic=critic)
    return policy, init_critic(jax.random.key(config.seed), policy, params, critic)


def remat_of(config: TrainConfig) -> Remat:
    """What of a layer the backward pass recomputes."""
    if config.remat and config.keep_projections:
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return config.remat


def load_model(
    config: TrainConfig, algorithm: Algorithm, mesh: jax.sharding.Mesh | None = None
) -> tuple[Policy, Params, Any]:
    """Policy, initial parameters (the critic's among them) and tokenizer of a run.

    mesh: of several devices, over which the parameters are sharded as they are read.
    """
    spread = None if mesh is None or mesh.size == 1 else partial(_sharded, mesh)
    policy, params, tokenizer = load_policy(
        config.model, dtype=config.dtype, param_dtype=config.param_dtype, remat=remat_of(config), shardings=spread
    )
    return *with_critic(config, algorithm, policy, params), tokenizer


def _sharded(mesh: jax.sharding.Mesh, model: ModelConfig, shapes: Any) -> Any:
    check_mesh(model, mesh)
    return fully_sharded(shapes, model, mesh)


def model_digests(params: Params, tokenizer: Any) -> dict[str, str]:
    """Digests of the model's weights (without a critic), the same on any mesh, and of its tokenizer."""
    weights = {name: x for name, x in params.items() if name != "critic"}
    found = json.dumps([checksums(weights), structure(weights)], sort_keys=True)
    digest = hashlib.sha256(found.encode()).hexdigest()
    return {"the model's weights": digest, "the tokenizer": tokenizer_digest(tokenizer)}


def split_parameters(config: TrainConfig, policy: Policy, params: Params) -> tuple[Params | None, Params]:
    """(frozen parameters or None, trained parameters); `parameters.combine` combines them into the policy's.

    Without LoRA all parameters are trained. With it the model's weights are frozen, and new adapters are trained
    together with the critic, if there is one. Raises InputError if the model cannot have the adapters.
    """
    if not config.lora_rank:
        return None, params
    key, rank = jax.random.key(config.seed), config.lora_rank
    adapters = lora.init(key, policy.config, rank, config.lora_targets)
    base = {name: x for name, x in params.items() if name != "critic"}
    learning = {name: x for name, x in params.items() if name == "critic"} | adapters
    return lora.scaled(base, rank, config.lora_alpha), learning


def reference_of(config: TrainConfig, frozen: Params | None, params: Params) -> Params:
    """The initial policy in buffers that no update donates: the frozen weights, or a copy if all are trained."""
    if frozen is not None:
        return frozen
    copy = jax.tree.map(jnp.copy, {name: x for name, x in params.items() if name != "critic"})
    return to_host(copy) if config.reference_memory == "host" else copy


def check_critic(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if settings of a critic are given, but the method has none."""
    if needs_values(algorithm):
        return
    default = TrainConfig()
    given = [name for name in ("critic", "critic_steps") if getattr(config, name) != getattr(default, name)]
    given += ["optimizer.critic_learning_rate"] * (config.optimizer.critic_learning_rate is not None)
    if given:
        raise InputError(f"{config.algorithm} has no critic: leave out {', '.join(given)}")


def check_components(config: TrainConfig, rewards: Sequence[Reward]) -> None:
    """InputError if a hyper-parameter that names a reward does not name one of the run's."""
    named, known = hyperparameters_of(config).get("accuracy"), [reward.name for reward in rewards]
    if named is not None and named not in known:
        raise unknown(f"reward for the hyper-parameter accuracy of {config.algorithm}", named, known)


def check_method(
    config: TrainConfig, mesh: jax.sharding.Mesh, algorithm: Algorithm | None = None, own_source: bool = False
) -> Algorithm:
    """The method of a run. Raises InputError for all problems with it and its batches, before a model is loaded.

    algorithm: replaces the configured one. own_source: the batches come from a source other than the configured one;
    what it provides is checked once it has been made.
    """
    by_name = algorithm is None
    if algorithm is None:
        algorithm = make_algorithm(config)

    def check_experience() -> None:
        check_rollout(config, algorithm)
        if not own_source:
            check_provided(config, algorithm, provided_by(config, algorithm), by_name)

    rows = config.prompts_per_step * config.group_size
    gather(
        lambda: check_rows(rows, config.minibatches, config.micro_batches, row_shards(mesh)),
        lambda: check_groups(config, algorithm),
        lambda: check_critic(config, algorithm),
        check_experience,
    )
    return algorithm


def set_up(
    config: TrainConfig, inputs: Inputs | None = None, algorithm: Algorithm | None = None, own_source: bool = False
) -> tuple[RunParts, TrainState, Any]:
    """The parts of a run, its initial train state and the method's initial memory, on all devices.

    inputs: prompts and rewards that are already read; otherwise the rewards' processes live as long as this one.
    algorithm, own_source: see `check_method`.
    """
    mesh = mesh_of(config.mesh)
    hosts = in_units(all_hosts(), mesh)
    algorithm = check_method(config, mesh, algorithm, own_source)
    if inputs is None:
        inputs = Inputs(split_prompts(config), make_rewards(config))
    check_components(config, inputs.rewards)
    check_columns(config, inputs.prompts.training)
    policy, params, tokenizer = load_model(config, algorithm, mesh)
    for layer in values_of(algorithm.needs, "internal_logp"):
        inner_policy(policy, params, int(layer))  # raises InputError for a layer that the model does not have
    prompts, held_out = prompt_sets(config, tokenizer, policy.config.max_positions, inputs.prompts)
    digests = {**inputs.digests, **model_digests(params, tokenizer)}
    hosts.agree({**digests, "the settings": repr(config), "the code and packages": code_digest()})
    if mesh.size > 1:
        policy = dataclasses.replace(policy, mesh=mesh)
    frozen, params = shard(split_parameters(config, policy, params), policy, mesh)
    reference = reference_of(config, frozen, params) if of_reference(algorithm.needs) else None
    gradient_steps = config.steps * config.epochs * config.minibatches
    optimizer = make_optimizer(config.optimizer, gradient_steps)
    facts = RunFacts(prompts=len(prompts.rows), steps=config.steps)
    state, memory = start(policy, algorithm, optimizer, params, facts, mesh)
    parts = RunParts(
        algorithm, policy, tokenizer, prompts, held_out, inputs.rewards, optimizer,
        learning_rate(config.optimizer, gradient_steps), digests, reference, mesh, frozen, hosts,
    )  # fmt: skip
    return parts, state, memory
