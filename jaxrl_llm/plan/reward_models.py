"""Memory of the reward models of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.distributed import fully_sharded
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.io.reward_model import read_scoring
from jaxrl_llm.models.policy import init_params
from jaxrl_llm.rewards.registry import model_path
from jaxrl_llm.training.config import TrainConfig

Weights = Sequence[tuple[ModelConfig, Any]]  # of each model, as shapes


def model_weights(config: TrainConfig) -> Weights:
    """The weights of a run's reward models. InputError for what is none."""
    models = [read_scoring(path)[2] for path in map(model_path, config.rewards) if path is not None]
    make = partial(init_params, dtype=jnp.dtype(config.dtype))
    return [(model, jax.eval_shape(partial(make, config=model), jax.random.key(0))) for model in models]


def model_bytes(weights: Weights, mesh: Mesh | AbstractMesh) -> int:
    """Bytes of reward models on each device of a mesh of one host, over which they are sharded as the policy is."""
    total = 0
    for model, tree in weights:
        for x, place in zip(jax.tree.leaves(tree), jax.tree.leaves(fully_sharded(tree, model, mesh)), strict=True):
            total += x.dtype.itemsize * math.prod(place.shard_shape(x.shape))
    return total
