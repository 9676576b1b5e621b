"""The forward pass over rows of several segments, with or without a cache of keys and values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Params, run
from jaxrl_llm.models.layers.attention import Weighing, attention
from jaxrl_llm.models.layers.recurrent import segments_flow
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError


class Cache(NamedTuple):
    """Keys and values of the tokens so far. Slots fill from the left; rows may leave gaps (segment 0)."""

    memory: Any  # (keys, values) of each layer, [N, K, S, h] each; stacked where layers are, and of one kind
    positions: jax.Array  # int32[N, S]
    segments: jax.Array  # int32[N, S], 0 where a slot holds nothing
    length: jax.Array  # int32[]: the next slot


def empty_cache(config: ModelConfig, rows: int, slots: int, dtype: Any, stacked: bool = False) -> Cache:
    """An empty cache for `slots` tokens a row. stacked: the layers are."""

    def zeros(number: int, *lead: int) -> Any:
        own = config.of_layer(number)
        if own.keys_of:
            return None
        heads, *sizes = own.heads_kept(absorbed=False)
        return tuple(jnp.zeros((*lead, rows, heads, slots, size), dtype) for size in sizes)

    marks = jnp.zeros((rows, slots), jnp.int32)
    if stacked and not config.kinds:
        return Cache(zeros(0, config.num_layers), marks, marks, jnp.int32(0))
    return Cache(tuple(map(zeros, range(config.num_layers))), marks, marks, jnp.int32(0))


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    cache: Cache | None = None,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """Hidden states after the last norm, [N, L, D], and the cache with these tokens in it.

    tokens int32[N, L]; positions int32[N, L] rotate the heads; segments int32[N, L]: a token sees the earlier
    tokens (by slot, not by position) of its own segment, of a masked-diffusion model the later ones too, and 0 is
    padding, which nothing sees. Padding may stand anywhere. With a cache the tokens are written to its next L slots.
    Options: `dtype` is that of weights and states (default: the parameters'); norms, rotations, attention logits and
    softmax are float32. `activations` is that of states alone. `rounding` rounds projections, see `quantised`.
    `remat` recomputes each layer in the backward pass; see `Remat`.
    """
    L = tokens.shape[1]
    if cache is None:
        first, seen_positions, seen_segments = jnp.int32(0), positions, segments
    else:
        first = cache.length
        seen_positions = jax.lax.dynamic_update_slice(cache.positions, positions, (0, first))
        seen_segments = jax.lax.dynamic_update_slice(cache.segments, segments, (0, first))
    slot = first + jnp.arange(L)
    same = (segments[:, :, None] == seen_segments[:, None, :]) & (segments[:, :, None] > 0)
    if config.unmasking is None:
        visible = same & (jnp.arange(seen_positions.shape[1])[None, :] <= slot[:, None])
    elif cache is None:
        visible = same
    else:
        raise InputError("a masked-diffusion model keeps no keys and values, since later tokens change them")
    distance = positions[:, :, None] - seen_positions[:, None, :]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, how: Weighing) -> tuple[jax.Array, Any]:
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if memory is not None:
            k = jax.lax.dynamic_update_slice(memory[0], k.astype(memory[0].dtype), (0, 0, first, 0))
            v = jax.lax.dynamic_update_slice(memory[1], v.astype(memory[1].dtype), (0, 0, first, 0))
            memory = (k, v)
        near = visible & ((distance < how.window) | (how.window == 0)) if any(config.window_of_layer) else visible
        return attention(q, k.astype(q.dtype), v.astype(q.dtype), near, how), memory

    if cache is None:
        flow = segments_flow(segments) if config.recurrent else None
        hidden, _ = run(params, config, tokens, positions, attend, flow=flow, **options)
        return hidden, None
    if config.recurrent:
        raise InputError("a model that carries states has no cache of this kind: draw tokens with `sample`")
    if config.kinds:
        params = unstack(params, config)
    hidden, memory = run(params, config, tokens, positions, attend, cache.memory, **options)
    return hidden, Cache(memory, seen_positions, seen_segments, first + L)
