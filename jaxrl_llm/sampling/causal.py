"""A forward pass over rows of tokens that keeps the keys and values of every layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxrl_kernels.partition import mesh_of

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models import decoder
from jaxrl_llm.models.layers.attention import Attend, Weighing
from jaxrl_llm.models.layers.packed_attention import LANES, by_kernel, causal_tokens
from jaxrl_llm.models.layers.recurrent import rows_flow
from jaxrl_llm.models.placement import (
    ANYWHERE,
    SAMPLED_ROWS,
    TENSOR,
    AnyMesh,
    Placement,
    row_axes,
    row_shards,
    takes_kernels,
)
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.two_model_decode import run


def causal_pass(
    policy: Policy, params: Params, tokens: Array, length: Array, record: bool = False
) -> tuple[Array, Any]:
    """Hidden states [R, L, D] (of two policies [R, L, 2 D]), and keys (after RoPE) and values [R, L, K, h] of layers.

    record: instead of the latter, (keys and values, experts int[R, L, layers, k]).

    tokens: int32[R, L], right-padded; length: int32[R]. Long rows take the attention kernel where there is one.
    """
    R, L = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(L), (R, L))
    config, attention, placed = policy.config, dense(policy, positions, length), ANYWHERE
    if takes_kernels(policy.mesh) and L % LANES == 0:
        # The mesh of the sampler is that of the arrays: it may be one host's.
        attention = by_kernel(config, causal_tokens(length, L), L * (L + 1) // 2, None, SAMPLED_ROWS)
        placed = between_layers(mesh_of(None, tokens), R, L)

    def attend(q: Array, k: Array, v: Array, memory: None, how: Weighing) -> tuple[Array, tuple[Array, Array]]:
        return attention(q, k, v, None, how)[0], (k, v)

    flow = rows_flow(length) if config.recurrent else None
    return run(policy, params, tokens, positions, attend, record=record, placement=placed, flow=flow)


def between_layers(mesh: AnyMesh | None, rows: int, tokens: int) -> Placement:
    """States [rows, tokens, D] with tokens over "tensor" between layers, so that devices share the norms.

    What devices receive in a layer is the same: a reduce-scatter and an all-gather instead of an all-reduce.
    """
    if mesh is None or mesh.shape.get(TENSOR, 1) == 1 or tokens % mesh.shape[TENSOR]:
        return ANYWHERE
    over = row_axes(mesh, SAMPLED_ROWS) if rows % row_shards(mesh, SAMPLED_ROWS) == 0 else None

    def states(x: Array, whole: bool) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(over, None if whole else TENSOR)))

    return ANYWHERE._replace(states=states)


def dense(policy: Policy, positions: Array, length: Array) -> Attend:
    """Attention by a mask of all pairs of tokens. positions: int32[R, L]; length: int32[R]."""
    config = policy.config
    real = positions < length[:, None]
    seen = real[:, None, :] & (positions[:, :, None] >= positions[:, None, :])
    distance = positions[:, :, None] - positions[:, None, :]

    def attend(q: Array, k: Array, v: Array, memory: Any, how: Weighing) -> tuple[Array, None]:
        near = seen & ((distance < how.window) | (how.window == 0)) if any(config.window_of_layer) else seen
        return decoder.attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), near, how), None

    return attend


def of_layer(kvs: Any, number: int) -> tuple[Array, Array]:
    """Keys and values of one layer, given a tuple of pairs or a pair of stacked arrays."""
    if isinstance(kvs[0], tuple):
        return kvs[number]
    return kvs[0][number], kvs[1][number]
