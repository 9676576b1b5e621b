"""A model by name, or the trained model of a run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import Policy, load_policy
from jaxrl_llm.models.lora import join
from jaxrl_llm.models.policy import Params
from jaxrl_llm.training.checkpoints import Checkpoints
from jaxrl_llm.training.config import TrainConfig, from_dict
from jaxrl_llm.training.run_folder import RunFolder
from jaxrl_llm.training.setup import load_model, make_algorithm, split_parameters


def load_run(path_or_name: str) -> tuple[TrainConfig, Policy, Params, Any]:
    """Configuration, policy, parameters and tokenizer: of a run's newest checkpoint, or of a model (as `load_policy`).

    The parameters of a run with LoRA are the model's with adapters (`lora.merge` puts them into the weights).
    InputError where a run has no checkpoint that can be read.
    """
    folder = RunFolder(path_or_name)
    if not folder.is_run():
        return TrainConfig(model=path_or_name), *load_policy(path_or_name)
    config = from_dict(folder.read_config())
    policy, params, tokenizer = load_model(config, make_algorithm(config))
    frozen, params = split_parameters(config, policy, params)
    if not Path(folder.checkpoints).is_dir():
        raise InputError(f"{path_or_name} has no checkpoints yet")
    with closing(Checkpoints(folder.checkpoints)) as checkpoints:
        restored = checkpoints.latest(params)
    if restored is None:
        raise InputError(f"{path_or_name} has no checkpoint that can be read")
    learned = {name: x for name, x in restored.params.items() if name != "critic"}
    return config, policy, join(frozen, learned), tokenizer
