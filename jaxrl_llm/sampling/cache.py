"""What sampling remembers: prompts stored once, and each row's own tokens in a ring.

P prompt slots, W lanes of a prompt slot (rows that may continue it at a time), B rows, K key-value heads, R = H / K
query heads of each, h head size, S columns. Attention has two parts, over the prompt and over the row's own tokens,
merged by their log-sum-exps.

The ring: at step s of the decode loop every row writes the keys and values of its newest token to column s mod S, so a
step writes one column whenever its rows began, and a layer with a sliding window needs a ring of its window only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import MASKED

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


class Part(NamedTuple):
    """Attention to some of the tokens: sums of exp(logit - greatest)."""

    weighted: Array  # f32[N, K, W, R, h], of the values
    greatest: Array  # f32[N, K, W, R]
    total: Array  # f32[N, K, W, R]


def each(f: Callable[..., Array], *caches: LayerCache) -> LayerCache:
    """f(arrays of all caches, axis that counts columns) for keys, values and, if there are, scales."""
    arrays = zip(*caches, (3, 2, 2, 2), strict=True)
    return LayerCache(*(None if xs[0] is None else f(*xs) for xs in arrays))  # type: ignore[arg-type]


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


def write_column(cache: LayerCache, k: Array, v: Array, column: Array) -> LayerCache:
    """The cache with one token of each row, k and v [N, 1, K, h], in a column."""
    write = lambda old, new, axis: jax.lax.dynamic_update_slice_in_dim(old, new, column, axis)  # noqa: E731
    return each(write, cache, pack(k, v, cache.keys.dtype))


def look(q: Array, cache: LayerCache, visible: Array, config: ModelConfig) -> Part:
    """q [N, K, W, R, h] at a cache of N rows; visible: bool[N, W, S], or [N, 1, S] if all lanes see the same."""
    N, K, W, R, h = q.shape
    flat = q.reshape(N, K, W * R, h)
    logits = jnp.einsum("nkqh,nkhs->nkqs", flat, cache.keys.astype(q.dtype), preferred_element_type=jnp.float32)
    if cache.key_scale is not None:
        logits = logits * cache.key_scale[:, :, None]
    logits = logits * config.query_scale
    if config.attention_softcap:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    seen = jnp.repeat(visible, R, axis=1)[:, None] if visible.shape[1] > 1 else visible[:, None]
    logits = jnp.where(seen, logits, MASKED)
    greatest = jnp.max(logits, axis=-1)
    # Where nothing is seen this is exp(0), which `merge` weighs with 0: the other part's logits are far above MASKED.
    weights = jnp.exp(logits - greatest[..., None])
    total = jnp.sum(weights, axis=-1)
    if cache.value_scale is not None:
        weights = weights * cache.value_scale[:, :, None]
    values = cache.values.astype(q.dtype)
    weighted = jnp.einsum("nkqs,nksh->nkqh", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
    return Part(weighted.reshape(N, K, W, R, h), greatest.reshape(N, K, W, R), total.reshape(N, K, W, R))


def merge(a: Part, b: Part) -> Array:
    """The attention's result over the tokens of both, f32[N, K, W, R, h]."""
    greatest = jnp.maximum(a.greatest, b.greatest)
    of_a, of_b = jnp.exp(a.greatest - greatest), jnp.exp(b.greatest - greatest)
    total = a.total * of_a + b.total * of_b
    return (a.weighted * of_a[..., None] + b.weighted * of_b[..., None]) / jnp.maximum(total, 1e-30)[..., None]


def visible_prompt(length: Array, position: Array, S: int, window: int) -> Array:
    """bool[P, W, S]: which columns of prompts of these lengths int32[P] the tokens at position int32[P, W] see.

    Without a window (0) bool[P, 1, S], as the position plays no part.
    """
    at = jnp.maximum(length - S, 0)[:, None] + jnp.arange(S)  # the position that a column holds
    seen = (at < length[:, None])[:, None]
    return seen & (position[..., None] - at[:, None] < window) if window else seen


def visible_own(count: Array, step: Array, S: int, window: int) -> Array:
    """bool[B, 1, S]: which columns of the ring the newest tokens see, theirs at `step` included.

    count: int32[B], own tokens of a row before the newest one.
    """
    age = (step - jnp.arange(S)) % S
    seen = age <= count[:, None]
    return (seen & (age < window) if window else seen)[:, None]


def rearranged(x: Array, order: Array | None, shape: tuple[int, ...]) -> Array:
    """x[order] along the first axis, or x as it is for None, its first axes in another shape."""
    x = x if order is None else x[order]
    return x.reshape(*shape, *x.shape[1:])


def two_part_attention(
    q: Array,
    own: LayerCache,
    prefix: LayerCache,
    lanes: Lanes | None,
    count: Array,
    length: Array,
    position: Array,
    step: Array,
    window: int,
    config: ModelConfig,
) -> Array:
    """Each row's newest token, q [B, 1, H, h], at its prompt and at its own tokens -> [B, 1, H, h].

    lanes: None where row b stands in lane b; count, position: int32[B]; length: int32[P], of the prompts.
    """
    B, _, H, h = q.shape
    P, K = prefix.keys.shape[:2]
    W = (B if lanes is None else lanes.row.shape[0]) // P
    q = q.reshape(B, K, H // K, h)
    order, back = (None, None) if lanes is None else (lanes.row, lanes.of_row)
    of_lanes = rearranged(q, order, (P, W)).swapaxes(1, 2)  # [P, K, W, R, h]
    seen = visible_prompt(length, rearranged(position, order, (P, W)), prefix.keys.shape[3], window)
    prompt = look(of_lanes, prefix, seen, config)

    def rows(x: Array) -> Array:
        """[P, K, W, ...] -> [B, K, 1, ...]"""
        return rearranged(x.swapaxes(1, 2).reshape(P * W, *x.shape[1:2], *x.shape[3:]), back, (B,))[:, :, None]

    mine = look(q[:, :, None], own, visible_own(count, step, own.keys.shape[3], window), config)
    return merge(Part(*map(rows, prompt)), mine).reshape(B, 1, H, h).astype(q.dtype)
