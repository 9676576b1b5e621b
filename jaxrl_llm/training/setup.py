"""Set-up of a run from its configuration: the model, the prompts, the rewards, the optimiser."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import Given
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.needs import values_of
from jaxrl_llm.core.reference import Update
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed import check_mesh, fully_sharded
from jaxrl_llm.distributed.hosts import ALONE, Hosts, all_hosts
from jaxrl_llm.distributed.on_hosts import in_units
from jaxrl_llm.learner.optimizer import learning_rate
from jaxrl_llm.learner.setup import shard, start
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.models import load_policy, load_reward_model, lora
from jaxrl_llm.models.by_row.members import check_members
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.critic import critic_of, init_critic, start_as_reward_model
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.io.digest import tokenizer_digest
from jaxrl_llm.models.io.load import Shardings, load_tokenizer
from jaxrl_llm.models.io.reward_model import is_scoring
from jaxrl_llm.models.layers.projections import keep_projections
from jaxrl_llm.models.outputs.soft_thinking import check_thinking
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import frozen_weight
from jaxrl_llm.models.scores import init_reward_model, padding_of
from jaxrl_llm.models.stacks import inner_policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.models import on_devices
from jaxrl_llm.training.agents import agent_digests, check_agent, is_agent, tell_ends
from jaxrl_llm.training.asynchrony import meshes_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checksums import checksums, structure
from jaxrl_llm.training.folder.code_digest import code_digest
from jaxrl_llm.training.inputs import Inputs, make_rewards, prompt_sets, split_prompts
from jaxrl_llm.training.method import (
    check_components,
    check_likelihood,
    check_method,
    method_digests,
    named,
    optimizer_of,
    record_of,
    with_routing,
)
from jaxrl_llm.training.other_policies.reference import first_policies, fixed_reference, update_rules, wants_reference
from jaxrl_llm.training.other_policies.server_teacher import ServerTeacher
from jaxrl_llm.training.other_policies.teacher import check_column_of_teachers, load_teacher, weights_of
from jaxrl_llm.training.rollout import check_columns, hook_of, rollout_of
from jaxrl_llm.utils.errors import InputError, several
from jaxrl_llm.utils.starting import phase

HEADS = ("critic", "score")  # of parameters, which are trained beside adapters


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
    reference: Any  # the weights of the reference that stays (or a `reference.Mixture`), if the method needs one
    mesh: jax.sharding.Mesh
    sampler: jax.sharding.Mesh  # on which tokens are sampled: the same devices, but with sampler_devices
    frozen: Params | None = None  # the model's weights, if only adapters are trained
    hosts: Hosts = ALONE
    notes: tuple[str, ...] = ()  # what to say when the run starts
    record: Mapping[str, Any] = {}  # what config.json says of a method outside of the catalogue
    policies: Mapping[str, Any] = {}  # those that move, at first, see `reference.first_policies`
    rules: Mapping[str, Update] = {}  # and how they move
    hook: Hook | None = None  # what tokens are drawn through
    kept: Callable[[Trajectories], Trajectories] = lambda batch: batch  # fills in what is kept of a reference on disk
    teacher: FrozenPolicy | Teachers | ServerTeacher | None = None  # another model than the reference


def with_critic(config: TrainConfig, needs: Collection[str], policy: Policy, params: Params) -> tuple[Policy, Params]:
    """The policy and its parameters with a critic, where a method with these needs has one."""
    critic = critic_of(needs, config.critic)
    if critic is None:
        return policy, params
    policy = dataclasses.replace(policy, critic=critic)
    made = init_critic(jax.random.key(config.seed), policy, lora.merge(params), critic)  # a tower has no adapters
    return policy, {**params, "critic": made["critic"]}


def remat_of(config: TrainConfig) -> Remat:
    """What of a layer the backward pass recomputes."""
    if config.remat and config.keep_projections:
        return keep_projections
    return config.remat


def with_precision(config: TrainConfig, policy: Policy) -> Policy:
    """The policy, which computes as the configuration says."""
    return dataclasses.replace(
        policy,
        activations=None if config.activations in ("dtype", config.dtype) else jnp.dtype(config.activations),
        rounding=config.weight_dtype if config.same_rounding else None,
    )


def keep_of(config: TrainConfig) -> Callable[[str, jax.Array], Any] | None:
    """What is kept of a parameter of the model, see `load_policy`; None: all of it."""
    return None if config.frozen_dtype == "param_dtype" else partial(frozen_weight, kind=config.frozen_dtype)


def load_model(
    config: TrainConfig, needs: Collection[str], mesh: jax.sharding.Mesh | None = None,
    sampler: jax.sharding.Mesh | None = None,
) -> tuple[Policy, Params, Any]:  # fmt: skip
    """Policy, initial parameters (the critic's among them) and tokenizer of a run whose method has these needs.

    mesh: of several devices, over which the parameters are sharded as they are read. sampler: the same devices as
    tokens are sampled on them; InputError where either does not divide the model.
    """
    spread = None if mesh is None or mesh.size == 1 else partial(_sharded, mesh, sampler or mesh)
    if values_of(needs, "scores"):
        return load_scoring(config, int(values_of(needs, "scores")[-1]), spread)
    policy, params, tokenizer = load_policy(
        config.model, dtype=config.dtype, param_dtype=config.param_dtype, remat=remat_of(config), shardings=spread,
        adapter=config.adapter, context=config.context_tokens or None, keep=keep_of(config),
    )  # fmt: skip
    policy, params = with_critic(config, needs, with_precision(config, policy), params)
    if config.critic_model is not None and policy.critic is not None:
        reward, weights, _ = load_reward_model(
            config.critic_model, dtype=config.dtype, param_dtype=config.param_dtype, shardings=spread
        )
        params = start_as_reward_model(policy, params, reward, weights)
    return policy, params, tokenizer


def load_scoring(config: TrainConfig, labels: int, spread: Shardings | None) -> tuple[Policy, Params, Any]:
    """The reward model that a run begins with: the configured one, or the language model with a new head.

    InputError for a reward model of another number of labels, or whose padding is not the tokenizer's.
    """
    how: dict[str, Any] = {
        "dtype": config.dtype, "param_dtype": config.param_dtype, "remat": remat_of(config), "shardings": spread,
        "adapter": config.adapter, "context": config.context_tokens or None,
    }  # fmt: skip
    if not is_scoring(config.model):
        policy, params, tokenizer = load_policy(config.model, keep=keep_of(config), **how)
        names = tuple(f"LABEL_{number}" for number in range(labels))
        model, params = init_reward_model(jax.random.key(config.seed), policy, params, names)
        return with_precision(config, model), params, tokenizer
    model, params, tokenizer = load_reward_model(config.model, **how)
    head = model.config.score
    if head is None or len(head.labels) != labels or head.pad_token_id != padding_of(tokenizer, model.config):
        raise InputError(
            f"{config.model} is a reward model of {several(len(head.labels) if head else 0, 'label')} with the padding "
            f"{head and head.pad_token_id}, but {config.algorithm} trains one of {several(labels, 'label')} and the "
            f"tokenizer pads with {padding_of(tokenizer, model.config)}: give one that fits, or a language model"
        )
    return with_precision(config, model), params, tokenizer


def _sharded(mesh: jax.sharding.Mesh, sampler: jax.sharding.Mesh, model: ModelConfig, shapes: Any) -> Any:
    check_mesh(model, mesh)
    check_mesh(model, sampler, "the sampling mesh")
    return fully_sharded(shapes, model, mesh)


WEIGHTS = "the model's weights"


def model_digests(params: Params, tokenizer: Any) -> dict[str, str]:
    """Digests of the model's weights (without a critic), the same on any mesh, and of its tokenizer."""
    weights = {name: x for name, x in params.items() if name != "critic"}
    found = json.dumps([checksums(weights), structure(weights)], sort_keys=True)
    digest = hashlib.sha256(found.encode()).hexdigest()
    return {WEIGHTS: digest, "the tokenizer": tokenizer_digest(tokenizer)}


def split_parameters(config: TrainConfig, policy: Policy, params: Params) -> tuple[Params | None, Params]:
    """(frozen parameters or None, trained parameters); `parameters.combine` combines them into the policy's.

    Without LoRA all parameters are trained. With it the model's weights are frozen, and adapters, new ones or those
    that the parameters have, are trained together with the critic or a reward model's head, if there is one. Raises
    InputError if the model cannot have the adapters, or there are none.
    """
    if not config.adapts:
        return None, params
    base = {name: x for name, x in params.items() if name not in HEADS}
    critic = {name: x for name, x in params.items() if name in HEADS}
    if config.adapter:
        base, adapters = lora.split(base)
        if not jax.tree.leaves(adapters):
            raise InputError(
                f"{config.adapter} has no adapters of projections that could be trained: merge it into the model "
                "(jaxrl export MODEL FOLDER --adapter ADAPTER), and train that"
            )
        return base, critic | adapters
    key, rank = jax.random.key(config.seed), config.lora_rank
    adapters = lora.init(key, policy.config, rank, config.lora_targets)
    base, adapters = lora.split(lora.scaled(combine(base, adapters), rank, config.lora_alpha))
    return base, critic | adapters


def reference_of(
    config: TrainConfig, algorithm: Algorithm, policy: Policy, frozen: Params | None, params: Params
) -> tuple[Any, dict[str, str]]:
    """(reference that stays or None, digests of further models); see `reference.fixed_reference`."""
    rule = algorithm.reference
    if not wants_reference(config, algorithm) or config.reference_memory == "disk":
        return None, {}
    others, digests = [], {}
    for name in () if rule is None else rule.models:
        spread = None if policy.mesh is None else partial(_sharded, policy.mesh, policy.mesh)
        _, other, tokenizer = load_policy(
            name, dtype=config.dtype, param_dtype=config.param_dtype, shardings=spread,
            context=config.context_tokens or None, keep=keep_of(config),
        )  # fmt: skip
        digests[f"the weights of {name}"] = model_digests(other, tokenizer)[WEIGHTS]
        if frozen is not None and not config.adapter:
            other = lora.scaled_like(other, frozen)
        others.append(other if policy.mesh is None else shard(other, policy, policy.mesh))
    return fixed_reference(config, rule, policy, frozen, params, others), digests


def set_up(
    config: TrainConfig, inputs: Inputs | None = None, given: Given | None = None, own_source: bool = False
) -> tuple[RunParts, TrainState, Any]:
    """The parts of a run, its initial train state and the method's initial memory, on all devices.

    inputs: prompts and rewards that are already read; otherwise the rewards' processes live as long as this one.
    given, own_source: see `check_method`.
    """
    config = named(config, given)
    mesh, sampler = meshes_of(config)
    hosts = in_units(all_hosts(), sampler)
    algorithm = check_method(config, mesh, given, own_source)
    if inputs is None:
        inputs = Inputs(split_prompts(config), make_rewards(config))
    check_components(config, inputs.rewards)
    if not own_source:  # which has no rollout
        check_columns(config, algorithm, inputs.prompts.training)
    check_column_of_teachers(config, inputs.prompts.training)
    plays = not own_source and is_agent(config)
    chats = check_agent(config, inputs.prompts.training, lambda: load_tokenizer(config.model)) if plays else []
    with phase(f"load the model {config.model}"):
        policy, params, tokenizer = load_model(config, algorithm.needs, mesh, sampler)
    algorithm = with_routing(config, algorithm, policy.config)
    check_likelihood(config, algorithm, policy.config)
    if not own_source and rollout_of(config, algorithm).population is not None:
        check_members(policy.config)
    if not own_source and (thinking := rollout_of(config, algorithm).thinking) is not None:
        check_thinking(thinking, policy.config)
        thinking.end_token(tokenizer)
    for layer in values_of(algorithm.needs, "internal_logp"):
        inner_policy(policy, params, int(layer))  # raises InputError for a layer that the model does not have
    model = policy.config
    tell_ends(chats, model.eos_token_ids)
    with phase("encode the prompts"):
        prompts, held_out = prompt_sets(config, tokenizer, model.max_positions, inputs.prompts, model.vocab_size)
    digests = {**inputs.digests, **method_digests(config, given), **model_digests(params, tokenizer)}
    digests |= agent_digests(config)
    with phase("agree with the other hosts"):
        hosts.agree({**digests, "the settings": repr(config), "the code and packages": code_digest()})
    if mesh.size > 1:
        policy = dataclasses.replace(policy, mesh=mesh)
    with phase("put the rewards on the devices"):
        rewards = on_devices(inputs.rewards, mesh, config.dtype)
    frozen, params = shard(split_parameters(config, policy, params), policy, mesh)
    reference, of_models = reference_of(config, algorithm, policy, frozen, params)
    digests |= of_models
    with phase("load the teacher"):
        teacher = load_teacher(config, policy, tokenizer, mesh)
    for name, one in weights_of(config, teacher):
        digests[f"the weights of the teacher {name}"] = model_digests(one.params, tokenizer)[WEIGHTS]
    hook = hook_of(config, algorithm, own_source)
    league = None if own_source else rollout_of(config, algorithm).demands.league
    optimizer = optimizer_of(config, algorithm)
    facts = RunFacts(prompts=len(prompts.rows), steps=config.steps)
    state, memory = start(policy, algorithm, optimizer, params, facts, mesh)
    parts = RunParts(
        algorithm, policy, tokenizer, prompts, held_out, rewards, optimizer,
        learning_rate(config.optimizer, config.gradient_steps), digests, reference, mesh, sampler, frozen, hosts,
        record=record_of(config, algorithm, given), policies=first_policies(config, algorithm, hook, params, league),
        rules=update_rules(algorithm, hook, league), hook=hook, teacher=teacher,
    )  # fmt: skip
    return parts, state, memory
