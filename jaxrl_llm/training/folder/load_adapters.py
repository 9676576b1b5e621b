"""Load several models that differ in their LoRA adapters alone: the arrays of the model below them are there once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import Policy, lora
from jaxrl_llm.models.io.adapter_params import adapter_params
from jaxrl_llm.models.io.adapters import open_adapter
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder, run_config
from jaxrl_llm.training.folder.load_run import needs_of, trained
from jaxrl_llm.training.run_model import load_model, model_digests, with_critic
from jaxrl_llm.utils.errors import InputError, shown

# Settings by which a model is loaded, and computes.
SHARED = ("dtype", "activations", "param_dtype", "frozen_dtype", "same_rounding", "context_tokens")


class Adapted(NamedTuple):
    """A model with adapters."""

    config: TrainConfig  # of its run, or of the model
    params: Params  # the model's, shared, with its adapters


def load_adapters(
    model: str, adapters: Mapping[str, str], accept_changed_inputs: bool = False
) -> tuple[Policy, Params, dict[str, Adapted]]:
    """A model's policy and parameters, and by name those with adapters of a run, or of a folder as PEFT writes it.

    The model computes as the runs say. InputError, in one line, for a model that is a run; for a run that trained no
    new adapters, on other weights than the model's, or with other `SHARED` settings than another; and for a folder
    whose adapter changes more than it adds.
    """
    if RunFolder(model, reading=True).is_run():
        raise InputError(
            f"{model} is a run, and --adapter NAME=... is for a model: give the model, and the run by name"
        )
    configs = {name: run_config(path) for name, path in adapters.items() if RunFolder(path, reading=True).is_run()}
    for name, config in configs.items():
        _check_run(adapters[name], config)
    for setting in SHARED:
        values = {getattr(config, setting): adapters[name] for name, config in configs.items()}
        if len(values) > 1:
            (one, first), (other, second), *_ = values.items()
            raise InputError(
                f"{setting} is {shown(one)} in {first}, and {shown(other)} in {second}: models that share their "
                "weights have one, so serve them apart"
            )
    usual = TrainConfig(model=model)
    own = dataclasses.replace(next(iter(configs.values()), usual), model=model, critic_model=None)
    policy, params, tokenizer = load_model(own, ())
    digests = model_digests(params, tokenizer) if configs else {}
    found: dict[str, Adapted] = {}
    for name, path in adapters.items():
        if name in configs:
            whole = _of_run(path, configs[name], policy, params, digests, accept_changed_inputs)
            found[name] = Adapted(configs[name], whole)
        else:
            found[name] = Adapted(usual, combine(params, _of_folder(path, policy)))
    return policy, params, found


def _check_run(path: str, config: TrainConfig) -> None:
    if not config.lora_rank:
        why = f"began with the adapters of {config.adapter}" if config.adapter else "trained all weights"
        remedy = f"write its adapters with jaxrl export {path} FOLDER --adapters, and give that"
        raise InputError(f"{path} {why}: {remedy if config.adapter else 'serve it by itself'}")


def _of_run(
    path: str, config: TrainConfig, policy: Policy, params: Params, digests: Mapping[str, str], accept: bool
) -> Params:
    folder = RunFolder(path, reading=True)
    needs = needs_of(folder, config)
    policy, params = with_critic(config, needs, policy, params)
    whole = trained(folder, config, policy, params, digests, accept)
    weights, adapters = lora.split(whole)
    return combine(weights, jax.tree.map(_unbound, adapters))


def _of_folder(path: str, policy: Policy) -> Params:
    adapter = open_adapter(Path(path).expanduser(), policy.config)
    if changed := sorted(adapter.merged):
        raise InputError(
            f"{path} changes {changed[0]} of the model itself, so that it cannot share its weights: serve it by "
            "itself, with --adapter FOLDER"
        )
    return jax.tree.map(jnp.asarray, adapter_params(adapter))


def _unbound(x: Any) -> jax.Array:
    """An array that is committed to no device, as the model's are."""
    return jnp.asarray(np.asarray(x))
