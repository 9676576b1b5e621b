"""The sampler's KV caches: a prefix cache that stores each prompt once, and a ring KV cache of each row's own tokens.

Shapes: P prompt slots of the prefix cache; W prefix slots for each of them, one for every row that can continue the
prompt at a time; B rows; K key-value heads; R = H / K query heads for each; h head size; S columns.

Cascade attention computes attention to the shared prompt and to the row's own tokens separately and merges the two by
their log-sum-exps.

At step s of the decode loop, every row writes the key and value of its newest token to column s mod S of the ring KV
cache. A step thus writes a single column, no matter when the rows started, and a layer with a sliding window needs only
as many columns as its window.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.decode_attention import PartialAttention, decode_attention, own_attention

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Weighing
from jaxrl_llm.models.layers.moe import NOT_RECORDED, index_dtype
from jaxrl_llm.models.layers.recurrent import Carried, empty_state
from jaxrl_llm.models.layers.sink_slots import merge_slots
from jaxrl_llm.models.quantised import kind_of, quantise


class LayerCache(NamedTuple):
    """Keys and values of one layer. Caches of eight bits have a scale for each token and head."""

    keys: Array  # [N, K, h, S], so that the product with a query runs along S
    values: Array  # [N, K, S, h]
    key_scale: Array | None = None  # f32[N, K, S]
    value_scale: Array | None = None  # f32[N, K, S]


Layers = tuple[LayerCache | Carried | None, ...]  # None of layers that attend to the keys of others


class PrefixCache(NamedTuple):
    """Keys and values of each prompt, stored once. Layers with a sliding window store only the end of a prompt, and
    those that carry a state that at its end."""

    layers: Layers
    length: Array  # int32[P], tokens of the prompt
    hidden: Array  # [P, D], last hidden state of the prompt, from which first tokens are drawn
    experts: Array | None = None  # int[P, S, layers, k], of the tokens of prompts; None: not recorded


class PrefixSlots(NamedTuple):
    """Which row is in which prefix slot. Prefix slots p * W to p * W + W - 1 continue the prompt in prompt slot p."""

    of_row: Array  # int32[B], the prefix slot of each row
    row: Array  # int32[P * W], the row in each prefix slot; any row where the slot is empty


def eight_bit(dtype: Any) -> bool:
    """Whether keys and values in a dtype have scales."""
    return jnp.dtype(dtype) in (jnp.int8, jnp.float8_e4m3fn)


def each(f: Callable[..., Array], *caches: LayerCache) -> LayerCache:
    """Map f(*arrays of all caches, column axis) over keys, values and, if present, scales."""
    arrays = zip(*caches, (3, 2, 2, 2), strict=True)
    return LayerCache(*(None if xs[0] is None else f(*xs) for xs in arrays))  # type: ignore[arg-type]


def take_columns(x: Array, columns: Array, axis: int) -> Array:
    """x[r, ..., columns[r], ...] along an axis; columns: int32[R, S]."""
    return jnp.take_along_axis(x, jnp.expand_dims(columns, tuple(a for a in range(1, x.ndim) if a != axis)), axis=axis)


def scales(cache: LayerCache) -> tuple[Array, Array] | None:
    """Scales of keys and values; None for a floating cache."""
    return None if cache.key_scale is None or cache.value_scale is None else (cache.key_scale, cache.value_scale)


def columns(config: ModelConfig, layer: int, most: int) -> int:
    """Number of columns that a layer needs for `most` tokens."""
    window = config.window_of_layer[layer]
    return min(most, window) if window else most


def empty(config: ModelConfig, rows: int, most: int, dtype: Any) -> Layers:
    """Empty caches for `most` tokens of each row in every layer. dtype: floating, or int8.

    A `Carried` for layers that carry one; None for layers that attend to the keys of others.
    """

    def layer(number: int) -> LayerCache | Carried | None:
        own = config.of_layer(number)
        if own.keys_of:
            return None
        if own.carries:
            return empty_state(own, rows, dtype)
        S = columns(config, number, most)
        heads, key, value = own.heads_kept(absorbed=True)
        scales = jnp.zeros((rows, heads, S), jnp.float32)
        # Separate buffers, because both are donated.
        return LayerCache(
            jnp.zeros((rows, heads, key, S), dtype), jnp.zeros((rows, heads, S, value), dtype),
            *((scales, jnp.zeros_like(scales)) if eight_bit(dtype) else (None, None)),
        )  # fmt: skip

    return tuple(layer(number) for number in range(config.num_layers))


def no_experts(config: ModelConfig, rows: int, tokens: int) -> Array:
    """int[rows, tokens, layers, k]: room for the experts of tokens, in `moe.index_dtype`; none are known."""
    return jnp.full((rows, tokens, config.num_layers, config.experts_per_token), NOT_RECORDED, index_dtype(config))


@jax.named_scope("cache")
def pack(k: Array, v: Array, dtype: Any) -> LayerCache:
    """Keys and values [N, S, K, h] in the cache's layout.

    Eight bits: each vector's largest |entry| becomes 127, or 448 in float8, beyond which keys of some models would be.
    """
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    if not eight_bit(dtype):
        return LayerCache(k.swapaxes(2, 3).astype(dtype), v.astype(dtype))

    kind = kind_of(dtype)
    assert kind is not None

    def rounded(x: Array) -> tuple[Array, Array]:
        values, scale = quantise(x, kind, (-1,))
        return values, scale[..., 0]

    (k, key_scale), (v, value_scale) = rounded(k), rounded(v)
    return LayerCache(k.swapaxes(2, 3), v, key_scale, value_scale)


def rearranged(x: Array, order: Array | None, shape: tuple[int, ...]) -> Array:
    """x[order] (x itself for None) with its first axis reshaped to `shape`."""
    x = x if order is None else x[order]
    return x.reshape(*shape, *x.shape[1:])


def with_sinks(part: PartialAttention, q: Array, how: Weighing) -> PartialAttention:
    """Attention that also goes to the layer's sink slots and sinks, if any. q [N, K, W, R, h], with which `part` was
    made."""
    if how.slots is not None:
        part = merge_slots(part, q, how.slots, how.scale, how.softcap)
    return part if how.sinks is None else merge_sinks(part, how.sinks.reshape(1, q.shape[1], 1, q.shape[3]))


def merge_sinks(part: PartialAttention, sinks: Array) -> PartialAttention:
    """Attention that also goes to sinks, logits that broadcast to those of `part`, which have no values."""
    most = jnp.maximum(part.m, sinks.astype(part.m.dtype))
    kept = jnp.exp(part.m - most)
    return PartialAttention(part.acc * kept[..., None], most, part.l * kept + jnp.exp(sinks - most))


@jax.named_scope("attention")
def cascade_attention(
    q: Array,
    k: Array,
    v: Array,
    own: LayerCache,
    prefix: LayerCache,
    prefix_slots: PrefixSlots | None,
    count: Array,
    length: Array,
    position: Array,
    step: Array,
    how: Weighing,
) -> tuple[Array, LayerCache]:
    """Attention of each row's newest token, q [B, 1, H, h], to its prompt and its own tokens.

    k, v: [B, 1, K, h], written to column step mod S of the ring KV cache `own`. prefix_slots: None if row b is in
    prefix slot b. count: int32[B], own tokens before the newest. position: int32[B]. length: int32[P], of the prompts.

    Returns the result [B, 1, H, h] and the updated ring KV cache.
    """
    B, _, H, h = q.shape
    P, K = prefix.keys.shape[:2]
    g = v.shape[3]
    W = (B if prefix_slots is None else prefix_slots.row.shape[0]) // P
    q = q.reshape(B, K, H // K, h)
    order, back = (None, None) if prefix_slots is None else (prefix_slots.row, prefix_slots.of_row)
    q_of_slots = rearranged(q, order, (P, W)).swapaxes(1, 2)  # [P, K, W, R, h]
    numbers: Any = {"query_scale": how.scale, "softcap": how.softcap, "window": how.window}

    def rows(x: Array) -> Array:
        """[P, K, W, ...] -> [B, K, ...]"""
        return rearranged(x.swapaxes(1, 2).reshape(P * W, *x.shape[1:2], *x.shape[3:]), back, (B,))

    prompt = decode_attention(
        q_of_slots, prefix.keys, prefix.values, length, rearranged(position, order, (P, W)),
        key_scale=prefix.key_scale, value_scale=prefix.value_scale, **numbers,
    )  # fmt: skip
    prompt = with_sinks(prompt, q_of_slots, how)
    new = each(lambda x, axis: jnp.squeeze(x, axis), pack(k, v, own.keys.dtype))
    y, keys, values, own_scales = own_attention(
        q, new.keys, new.values, own.keys, own.values, count, step, PartialAttention(*map(rows, prompt)),
        new_scales=scales(new), scales=scales(own), **numbers,
    )  # fmt: skip
    return y.reshape(B, 1, H, g), LayerCache(keys, values, *(own_scales or (None, None)))
