"""Load the trained model of a run, or a model by name."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from jaxrl_llm.models import Policy, load_policy
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.files import RunFolder, is_of_texts, run_config
from jaxrl_llm.training.folder.resume_checks import PARAMETER_SETTINGS, check_changes
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.run_model import load_model, model_digests, split_parameters
from jaxrl_llm.utils.errors import InputError

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
    needs = needs_of(folder, config)
    if not Path(folder.checkpoints_for(1)).is_dir():
        raise InputError(f"{path_or_name} has no checkpoints yet")
    policy, params, tokenizer = load_model(dataclasses.replace(config, critic_model=None), needs)
    found = {**(digests or {}), **model_digests(params, tokenizer)}
    params = trained(folder, config, policy, params, found, accept_changed_inputs)
    return config, policy, params, tokenizer


def needs_of(folder: RunFolder, config: TrainConfig) -> Collection[str]:
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

    def changes(meta: dict[str, Any]) -> list[str]:
        return check_changes(meta, config, os.getcwd(), digests, accept, only=PARAMETER_SETTINGS)

    with closing(Checkpoints(folder.checkpoints_for(1))) as checkpoints:
        restored = checkpoints.latest(params, check=changes)
    if restored is None:
        raise InputError(f"{folder.path} has no checkpoints yet")
    for text in changes(restored.meta):
        logger.warning("%s", text)
    return combine(frozen, without_critic(restored.params))
