"""Load the trained model of a run, or a model by name."""

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import Policy, load_policy, lora
from jaxrl_llm.models.io.adapter_params import adapter_params
from jaxrl_llm.models.io.adapters import open_adapter
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.files import RunFolder, is_of_texts, run_config
from jaxrl_llm.training.folder.resume_checks import PARAMETER_SETTINGS, check_changes
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.run_model import load_model, model_digests, split_parameters, with_critic
from jaxrl_llm.utils.errors import InputError, shown

logger = logging.getLogger("jaxrl_llm.training")


def load_run(
    path_or_name: str,
    *,
    digests: Mapping[str, str] | None = None,
    accept_changed_inputs: bool = False,
    adapter: str | None = None,
) -> tuple[TrainConfig, Policy, Params, Any]:
    """Configuration, policy, parameters and tokenizer of a run's newest checkpoint, or of a model (as `load_policy`).

    Those of a run of jaxrl texts are its model's.

    With LoRA, the parameters are the model's together with the adapters (`lora.merge` adds them to the weights).
    adapter: a folder of adapters for a model that is no run, as for `load_policy`.
    digests: of further inputs to compare, named as in `inputs.Inputs.digests`.
    Raises InputError if a run has no usable checkpoint or, unless changes are accepted, if its model, the settings
    that determine its parameters, or these inputs have changed since the checkpoint.
    """
    folder = RunFolder(path_or_name, reading=True)
    if not folder.is_run():
        return run_config(path_or_name), *load_policy(path_or_name, adapter=adapter)
    if adapter is not None:
        raise InputError(
            f"{path_or_name} is a run, and --adapter is for a model: write the run's model first, with jaxrl export"
        )
    config = folder.read_config()
    if is_of_texts(config):
        return run_config(path_or_name), *load_model(config, frozenset())
    needs = _needs_of(folder, config)
    if not Path(folder.checkpoints_for(1)).is_dir():
        raise InputError(f"{path_or_name} has no checkpoints yet")
    policy, params, tokenizer = load_model(dataclasses.replace(config, critic_model=None), needs)
    found = {**(digests or {}), **model_digests(params, tokenizer)}
    params = trained(folder, config, policy, params, found, accept_changed_inputs)
    return config, policy, params, tokenizer


def _needs_of(folder: RunFolder, config: TrainConfig) -> Collection[str]:
    """The needs of a run's method, which may be outside of the catalogue and not there any more."""
    needs = folder.recorded_needs()
    return make_algorithm(config).needs if needs is None else needs


def trained(
    folder: RunFolder, config: TrainConfig, policy: Policy, params: Params, digests: Mapping[str, str], accept: bool
) -> Params:
    """The parameters of a run's newest checkpoint, without a critic; those that it froze are the ones given.

    params: with which the run began, a critic's too where it has one. Raises InputError as `load_run` does.
    """
    frozen, params = split_parameters(config, policy, params)
    changes = partial(
        check_changes, config=config, folder=os.getcwd(), digests=digests, accept=accept, only=PARAMETER_SETTINGS
    )
    with closing(Checkpoints(folder.checkpoints_for(1))) as checkpoints:
        restored = checkpoints.latest(params, check=changes)
    if restored is None:
        raise InputError(f"{folder.path} has no checkpoints yet")
    for text in changes(restored.meta):
        logger.warning("%s", text)
    return combine(frozen, without_critic(restored.params))


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
        if not config.lora_rank:
            if config.adapter:
                raise InputError(
                    f"{adapters[name]} began with the adapters of {config.adapter}: write its adapters with jaxrl "
                    f"export {adapters[name]} FOLDER --adapters, and give that"
                )
            raise InputError(f"{adapters[name]} trained all weights: serve it by itself")
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
        if (its := configs.get(name)) is not None:
            folder = RunFolder(path, reading=True)
            its_policy, begun = with_critic(its, _needs_of(folder, its), policy, params)
            whole = trained(folder, its, its_policy, begun, digests, accept_changed_inputs)
            weights, own_adapters = lora.split(whole)
            # Committed to no device, as the model's are.
            unbound = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), own_adapters)
            found[name] = Adapted(its, combine(weights, unbound))
        else:
            found[name] = Adapted(usual, combine(params, _of_folder(path, policy)))
    return policy, params, found


def _of_folder(path: str, policy: Policy) -> Params:
    adapter = open_adapter(Path(path).expanduser(), policy.config)
    if changed := sorted(adapter.merged):
        raise InputError(
            f"{path} changes {changed[0]} of the model itself, so that it cannot share its weights: serve it by "
            "itself, with --adapter FOLDER"
        )
    return jax.tree.map(jnp.asarray, adapter_params(adapter))
