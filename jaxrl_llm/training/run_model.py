"""The model of a run: policy, parameters and tokenizer, as its configuration says."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.needs import values_of
from jaxrl_llm.distributed import shardings_over
from jaxrl_llm.models import load_policy, load_reward_model, lora
from jaxrl_llm.models.critic import critic_of, init_critic, start_as_reward_model
from jaxrl_llm.models.decoder import Remat
from jaxrl_llm.models.io.load import Shardings
from jaxrl_llm.models.io.reward_model import is_scoring
from jaxrl_llm.models.io.tokenizer import tokenizer_digest
from jaxrl_llm.models.layers.projections import keep_projections
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params, Policy, with_sink_slots
from jaxrl_llm.models.quantised.layers import frozen_weight
from jaxrl_llm.models.scores import init_reward_model, padding_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import catalogue_hyperparameters
from jaxrl_llm.training.folder.checksums import checksums, structure
from jaxrl_llm.utils.errors import InputError, several

HEADS = ("critic", "score")  # of parameters, which are trained beside adapters


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
    return keep_projections if config.remat and config.keep_projections else config.remat


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
    spread = shardings_over(mesh, sampler)
    if values_of(needs, "scores"):
        return load_scoring(config, int(values_of(needs, "scores")[-1]), spread)
    policy, params, tokenizer = load_policy(
        config.model, dtype=config.dtype, param_dtype=config.param_dtype, remat=remat_of(config), shardings=spread,
        adapter=config.adapter, context=config.context_tokens or None, keep=keep_of(config),
    )  # fmt: skip
    policy, params = with_sink_slots(policy, params, config.sink_slots)
    policy, params = with_critic(config, needs, with_precision(config, policy), params)
    if config.critic_model is not None and policy.critic is not None:
        reward, weights, _ = load_reward_model(
            config.critic_model, dtype=config.dtype, param_dtype=config.param_dtype, shardings=spread
        )
        params = start_as_reward_model(policy, params, reward, weights)
    return policy, params, tokenizer


def load_scoring(config: TrainConfig, labels: int, spread: Shardings | None) -> tuple[Policy, Params, Any]:
    """The reward model that a run begins with: the configured one, or the language model with a new head.

    InputError for a reward model of another number of labels, whose padding is not the tokenizer's, or whose steps have
    another separator than the method's.
    """
    if config.sink_slots:
        raise InputError(f"{config.algorithm} trains a reward model, which has no sink slots: leave out sink_slots")
    separator = catalogue_hyperparameters(config).get("separator")
    how: dict[str, Any] = {
        "dtype": config.dtype, "param_dtype": config.param_dtype, "remat": remat_of(config), "shardings": spread,
        "adapter": config.adapter, "context": config.context_tokens or None,
    }  # fmt: skip
    if not is_scoring(config.model):
        policy, params, tokenizer = load_policy(config.model, keep=keep_of(config), **how)
        names = tuple(f"LABEL_{number}" for number in range(labels))
        model, params = init_reward_model(jax.random.key(config.seed), policy, params, names, separator)
        return with_precision(config, model), params, tokenizer
    model, params, tokenizer = load_reward_model(config.model, **how)
    head = model.config.score
    if head is None or len(head.labels) != labels or head.pad_token_id != padding_of(tokenizer, model.config):
        raise InputError(
            f"{config.model} is a reward model of {several(len(head.labels) if head else 0, 'label')} with the padding "
            f"{head and head.pad_token_id}, but {config.algorithm} trains one of {several(labels, 'label')} and the "
            f"tokenizer pads with {padding_of(tokenizer, model.config)}: give one that fits, or a language model"
        )
    if head.step_separator not in (None, separator):
        raise InputError(
            f"{config.model} scores steps that end with {head.step_separator!r}, but those of {config.algorithm} end "
            f"with {separator!r}: set --algorithm.separator"
        )
    head = head._replace(step_separator=separator)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, score=head))
    return with_precision(config, model), params, tokenizer


WEIGHTS = "the model's weights"


def model_digests(params: Params, tokenizer: Any) -> dict[str, str]:
    """Digests of the model's weights (without a critic), the same on any mesh, and of its tokenizer."""
    weights = without_critic(params)
    digest = hashlib.sha256(json.dumps([checksums(weights), structure(weights)], sort_keys=True).encode()).hexdigest()
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
