"""Set-up of a run from its configuration: the method, the model, the prompts, the rewards, the optimiser."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from jaxrl_llm.algorithms import Given
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.needs import values_of
from jaxrl_llm.core.reference import REFERENCE, Update, chosen_snapshot
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed import shardings_over
from jaxrl_llm.distributed.hosts import ALONE, Hosts, all_hosts, in_units
from jaxrl_llm.learner.optimizer import learning_rate
from jaxrl_llm.learner.setup import shard, start
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.models import load_policy, lora
from jaxrl_llm.models.by_row import check_members
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.models.outputs.soft_thinking import check_thinking
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.stacks import inner_policy
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.models.steps import on_devices
from jaxrl_llm.training.asynchrony import meshes_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.checks import is_agent
from jaxrl_llm.training.folder.provenance import code_digest
from jaxrl_llm.training.inputs import Inputs, make_rewards, prompt_sets, split_prompts
from jaxrl_llm.training.method import check_method, method_digests, named, optimizer_of, record_of, with_routing
from jaxrl_llm.training.method_checks import check_components, check_likelihood
from jaxrl_llm.training.other_policies.reference import first_policies, fixed_reference, update_rules, wants_reference
from jaxrl_llm.training.other_policies.teacher import (
    ServerTeacher,
    check_column_of_teachers,
    load_teacher,
    teacher_list,
)
from jaxrl_llm.training.rollout import check_columns, hook_of, rollout_of
from jaxrl_llm.training.rollout.agents import agent_digests, check_agent, tell_ends
from jaxrl_llm.training.run_model import WEIGHTS, keep_of, load_model, model_digests, split_parameters
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.starting import phase


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

    @property
    def first_reference(self) -> Any:
        """The parameters of the reference before the first update, or a `Mixture`; None without a reference."""
        moving = self.policies.get(REFERENCE)
        return self.reference if moving is None else combine(self.frozen, chosen_snapshot(moving))

    @property
    def computed_teacher(self) -> FrozenPolicy | Teachers | None:
        """The teacher whose outputs the learner computes; None where a server says them."""
        return None if isinstance(self.teacher, ServerTeacher) else self.teacher


def reference_of(
    config: TrainConfig, algorithm: Algorithm, policy: Policy, frozen: Params | None, params: Params
) -> tuple[Any, dict[str, str]]:
    """(reference that stays or None, digests of further models); see `reference.fixed_reference`."""
    rule = algorithm.reference
    if not wants_reference(config, algorithm) or config.reference_memory == "disk":
        return None, {}
    others, digests = [], {}
    for name in () if rule is None else rule.models:
        if config.sink_slots:
            raise InputError(f"the reference {name} has no sink slots, which the policy has: leave out sink_slots")
        _, other, tokenizer = load_policy(
            name, dtype=config.dtype, param_dtype=config.param_dtype, shardings=shardings_over(policy.mesh),
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
    for name, one in teacher_list(config, teacher):
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
