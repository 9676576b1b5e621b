"""Memory of the models beside the policy that a run trains: reward models and teachers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.distributed import fully_sharded
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.models.policy import init_params
from jaxrl_llm.plan.layers import config_of
from jaxrl_llm.rewards.registry import model_path
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies.teacher import teachers_of

Weights = Sequence[tuple[ModelConfig, Any]]  # of each model, as shapes


def model_weights(config: TrainConfig) -> Weights:
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
    total = 0
    for model, tree in weights:
        for x, place in zip(jax.tree.leaves(tree), jax.tree.leaves(fully_sharded(tree, model, mesh)), strict=True):
            total += x.dtype.itemsize * math.prod(place.shard_shape(x.shape))
    return total
