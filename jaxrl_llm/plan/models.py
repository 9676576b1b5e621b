"""The models of a plan: the policy, the same with fewer layers, reward models and teachers."""

import math
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.distributed import fully_sharded
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.checks import with_slots
from jaxrl_llm.models.families import from_hf
from jaxrl_llm.models.io.load import DEMO_MODEL
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.models.kinds import json_object
from jaxrl_llm.models.policy import init_params
from jaxrl_llm.rewards.registry import model_path
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies.teacher import teachers_of
from jaxrl_llm.utils.errors import InputError


def config_of(model: str, sink_slots: int = 0) -> ModelConfig:
    """The configuration of a model, whose weights need not be there: a folder, a config.json, a .gguf file, the demo
    model, or a name on the Hugging Face hub. sink_slots: those that a run adds. InputError for anything else."""
    return with_slots(_published(model), sink_slots)


def _published(model: str) -> ModelConfig:
    path = Path(model).expanduser()
    if model == DEMO_MODEL or model.endswith(".gguf"):
        from jaxrl_llm.models.io.gguf import read_gguf, smollm2_path

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
    return from_hf(json_object(file), where=str(file))


def depths(model: ModelConfig) -> tuple[int, int]:
    """Two small numbers of layers that hold each kind of layer as often as all layers do, as far as they go."""
    of_layer = model.kind_of_layer or (0,) * model.num_layers
    kinds = list(zip(model.rope_of_layer, model.window_of_layer, of_layer, strict=True))

    def repeats_after(n: int) -> bool:
        return all(kind == kinds[i % n] for i, kind in enumerate(kinds))

    period = max(2, next(n for n in range(1, len(kinds) + 1) if repeats_after(n)))
    return period, 2 * period


Weights = Sequence[tuple[ModelConfig, Any]]  # of each model, as shapes


def reward_model_weights(config: TrainConfig) -> Weights:
    """The weights of a run's reward models. InputError for what is none."""
    return _as_shapes([read_scoring(path)[2] for path in map(model_path, config.rewards) if path is not None], config)


def teacher_weights(config: TrainConfig) -> Weights:
    """The weights of a run's teachers. InputError for what is no model."""
    return _as_shapes(list(teacher_models(config.teacher)), config)


@cache
def teacher_models(teacher: str | None) -> tuple[ModelConfig, ...]:
    """The models that a run's setting `teacher` names."""
    if teacher is None:
        return ()
    return tuple(config_of(path) for path in teachers_of(teacher).values() or [teacher])


def _as_shapes(models: Sequence[ModelConfig], config: TrainConfig) -> Weights:
    make = partial(init_params, dtype=jnp.dtype(config.dtype))
    return [(model, jax.eval_shape(partial(make, config=model), jax.random.key(0))) for model in models]


def model_bytes(weights: Weights, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of models on each device of a mesh of one host, over which they are sharded as the policy is."""
    return sum(
        x.dtype.itemsize * math.prod(place.shard_shape(x.shape))
        for model, tree in weights
        for x, place in zip(jax.tree.leaves(tree), jax.tree.leaves(fully_sharded(tree, model, mesh)), strict=True)
    )
