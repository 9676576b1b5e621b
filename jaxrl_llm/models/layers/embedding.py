"""Embeddings of tokens: where their states begin, and what each layer adds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.soft_thinking import Mixture
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import norm
from jaxrl_llm.models.layers.projections import linear, project, scaled_low_rank

Params = dict[str, Any]


@jax.named_scope("embedding")
def embed(
    params: Params, config: ModelConfig, tokens: jax.Array, dtype: Any, mixed: Mixture | None = None
) -> jax.Array:
    """The states [N, L, D] that tokens int32[N, L] begin with.

    mixed: [N, L, K] each, what stands in place of a token where its weights are not all 0.
    """
    x = _looked_up(params, tokens, dtype)
    if mixed is not None:
        soft = jnp.any(mixed.weights > 0, axis=-1)
        # One after another, so that no array is [N, L, K, D].
        terms = (
            mixed.weights[..., j, None].astype(dtype) * _looked_up(params, mixed.ids[..., j], dtype)
            for j in range(mixed.ids.shape[-1])
        )
        x = jnp.where(soft[..., None], sum(terms), x)
    return x if config.embedding_scale == 1.0 else x * jnp.asarray(config.embedding_scale, dtype)


def _looked_up(params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
    x = params["embed"][tokens].astype(dtype)
    if "embed_lora_in" in params:
        low_rank = scaled_low_rank(params["embed_lora_in"][tokens].astype(dtype), params)
        x = x + linear(low_rank, params["embed_lora_out"].astype(dtype))
    return x


@jax.named_scope("embedding")
def layer_inputs(params: Params, config: ModelConfig, tokens: jax.Array, x: jax.Array, dtype: Any) -> jax.Array | None:
    """Each token's embedding of each layer, [N, L, layers, inputs], of its number and of its embedding x (Gemma 4)."""
    if not config.layer_inputs:
        return None
    shape = (*tokens.shape, config.num_layers, config.layer_inputs)
    own = (params["embed_inputs"][tokens].astype(dtype) * jnp.asarray(config.layer_inputs**0.5, dtype)).reshape(shape)
    weight = params["project_inputs"].astype(dtype)
    projected = (project(x, weight, params, "project_inputs") * config.hidden_size**-0.5).reshape(shape)
    return (norm(projected, params["inputs_norm"], config) + own) * jnp.asarray(2.0**-0.5, dtype)
