"""Mixture of experts: each token goes through its best few MLPs, weighted by the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import accumulation_dtype


@jax.named_scope("experts")
def expert_mlp(
    x: jax.Array, layer: dict[str, Any], config: ModelConfig, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Route x [T, D] through `experts_per_token` of E gated MLPs and add up their outputs, [T, D].

    Weights are softmax probabilities over all experts (float32), renormalised over the chosen ones where the
    configuration says so. No token is dropped: tokens are sorted by expert and multiplied in ragged groups, so
    the output of a token does not depend on the others in the batch.
    layer: router [D, E], gate and up [E, D, F], down [E, F, D].
    """
    chosen = config.experts_per_token
    probabilities = jax.nn.softmax((x @ layer["router"]).astype(accumulation_dtype(x.dtype)), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, chosen)
    if config.normalise_router:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=config.num_experts).astype(jnp.int32)
    rows = x[order // chosen]
    inner = activation(jax.lax.ragged_dot(rows, layer["gate"], sizes)) * jax.lax.ragged_dot(rows, layer["up"], sizes)
    out = jax.lax.ragged_dot(inner, layer["down"], sizes)
    back = jnp.argsort(order).reshape(experts.shape)
    return jnp.sum(out[back] * weights[..., None].astype(x.dtype), axis=1)
