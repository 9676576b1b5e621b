"""What sampling remembers: prompts stored once, and each row's own tokens in a ring.

P prompt slots, W lanes of a prompt slot (rows that may continue it at a time), B rows, K key-value heads, R = H / K
query heads of each, h head size, S columns. Cascade attention: attention to the prompt, which rows share, and to
the row's own tokens are computed apart and merged by their log-sum-exps.

The ring: at step s of the decode loop every row writes the keys and values of its newest token to column s mod S, so a
step writes one column whenever its rows began, and a layer with a sliding window needs a ring of its window only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.decode_attention import Part, decode_attention, own_attention

from jaxrl_llm.models.config import ModelConfig

Array = jax.Array


class LayerCache(NamedTuple):
    """Keys and values of one layer; 8-bit ones have a scale for each token and head."""

    keys: Array  # [N, K, h, S]: the product with a query then runs along S
    values: Array  # [N, K, S, h]
    key_scale: Array | None = None  # f32[N, K, S]
    value_scale: Array | None = None  # f32[N, K, S]


class Prefixes(NamedTuple):
    """Prompts, each once, for all rows that continue it. Layers with a window keep the end of a prompt only."""

    layers: tuple[LayerCache, ...]
    length: Array  # int32[P], of the prompt
    hidden: Array  # [P, D], the last hidden state of the prompt: first tokens are drawn from it


class Lanes(NamedTuple):
    """Which row stands in which lane. Lane p * W + w continues prompt slot p."""

    of_row: Array  # int32[B]
    row: Array  # int32[P * W]: the row in a lane; any row where it is empty


def each(f: Callable[..., Array], *caches: LayerCache) -> LayerCache:
    """f(arrays of all caches, axis that counts columns) for keys, values and, if there are, scales."""
    arrays = zip(*caches, (3, 2, 2, 2), strict=True)
    return LayerCache(*(None if xs[0] is None else f(*xs) for xs in arrays))  # type: ignore[arg-type]


def scales(cache: LayerCache) -> tuple[Array, Array] | None:
    """Of keys and values, if there are."""
    return None if cache.key_scale is None or cache.value_scale is None else (cache.key_scale, cache.value_scale)


def columns(config: ModelConfig, layer: int, most: int) -> int:
    """How many columns a layer needs for `most` tokens."""
    window = config.window_of_layer[layer]
    return min(most, window) if window else most


def empty(config: ModelConfig, rows: int, most: int, dtype: Any) -> tuple[LayerCache, ...]:
    """Room for `most` tokens of each row in every layer. dtype: a floating one, or int8."""

    def layer(number: int) -> LayerCache:
        S = columns(config, number, most)
        shape = (rows, config.num_kv_heads, config.head_dim, S)
        scales = jnp.zeros((rows, config.num_kv_heads, S), jnp.float32)
        eight_bit = jnp.dtype(dtype) == jnp.int8
        # Two buffers each, for both are donated.
        return LayerCache(
            jnp.zeros(shape, dtype), jnp.zeros((*shape[:2], S, shape[2]), dtype),
            *((scales, jnp.zeros_like(scales)) if eight_bit else (None, None)),
        )  # fmt: skip

    return tuple(layer(number) for number in range(config.num_layers))


def pack(k: Array, v: Array, dtype: Any) -> LayerCache:
    """Keys and values [N, S, K, h] as a cache stores them. int8: each vector divided by its greatest entry / 127."""
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    if jnp.dtype(dtype) != jnp.int8:
        return LayerCache(k.swapaxes(2, 3).astype(dtype), v.astype(dtype))

    def rounded(x: Array) -> tuple[Array, Array]:
        x = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), 1e-30) / 127
        return jnp.round(x / scale[..., None]).astype(jnp.int8), scale

    (k, key_scale), (v, value_scale) = rounded(k), rounded(v)
    return LayerCache(k.swapaxes(2, 3), v, key_scale, value_scale)


def rearranged(x: Array, order: Array | None, shape: tuple[int, ...]) -> Array:
    """x[order] along the first axis, or x as it is for None, its first axes in another shape."""
    x = x if order is None else x[order]
    return x.reshape(*shape, *x.shape[1:])


def cascade_attention(
    q: Array,
    k: Array,
    v: Array,
    own: LayerCache,
    prefix: LayerCache,
    lanes: Lanes | None,
    count: Array,
    length: Array,
    position: Array,
    step: Array,
    window: int,
    config: ModelConfig,
) -> tuple[Array, LayerCache]:
    """Each row's newest token, q [B, 1, H, h], at its prompt and at its own tokens; and the ring with its k, v.

    k, v: [B, 1, K, h]; they are written to column step mod S of the ring. lanes: None where row b stands in lane b;
    count, position: int32[B]; length: int32[P], of the prompts. The result is [B, 1, H, h].
    """
    B, _, H, h = q.shape
    P, K = prefix.keys.shape[:2]
    W = (B if lanes is None else lanes.row.shape[0]) // P
    q = q.reshape(B, K, H // K, h)
    order, back = (None, None) if lanes is None else (lanes.row, lanes.of_row)
    of_lanes = rearranged(q, order, (P, W)).swapaxes(1, 2)  # [P, K, W, R, h]
    numbers: Any = {"query_scale": config.query_scale, "softcap": config.attention_softcap, "window": window}

    def rows(x: Array) -> Array:
        """[P, K, W, ...] -> [B, K, ...]"""
        return rearranged(x.swapaxes(1, 2).reshape(P * W, *x.shape[1:2], *x.shape[3:]), back, (B,))

    prompt = decode_attention(
        of_lanes, prefix.keys, prefix.values, length, rearranged(position, order, (P, W)),
        key_scale=prefix.key_scale, value_scale=prefix.value_scale, **numbers,
    )  # fmt: skip
    new = each(lambda x, axis: jnp.squeeze(x, axis), pack(k, v, own.keys.dtype))
    y, keys, values, of_ring = own_attention(
        q, new.keys, new.values, own.keys, own.values, count, step, Part(*map(rows, prompt)),
        new_scales=scales(new), scales=scales(own), **numbers,
    )  # fmt: skip
    return y.reshape(B, 1, H, h), LayerCache(keys, values, *(of_ring or (None, None)))
