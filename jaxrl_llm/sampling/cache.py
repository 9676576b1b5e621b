"""What sampling remembers: prompts stored once, and each row's own tokens in a ring.

P prompt slots, W lanes of a prompt slot (rows that may continue it at a time), B rows, K key-value heads, R = H / K
query heads of each, h head size, S columns. Attention has two parts, over the prompt and over the row's own tokens,
merged by their log-sum-exps.

The ring: at step s of the decode loop every row writes the keys and values of its newest token to column s mod S, so a
step writes one column whenever its rows began, and a layer with a sliding window needs a ring of its window only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxrl_kernels.decode_attention import Part, decode_attention, own_attention

from jaxrl_llm.models.config import ModelConfig

Array = jax.Array
Result = TypeVar("Result")


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


def on_devices(attention: Callable[..., Result], heads: int, mesh: Mesh | None, *arrays: Any) -> Result:
    """attention(*arrays), under a mesh on each device with its rows or prompt slots and its heads of them.

    For a kernel, which a TPU has for both parts, is not partitioned by the compiler. Arrays of three axes and more have
    heads along their second one, which are cut if they are in the caches (`weights.shardings`).
    """
    if mesh is None:
        return attention(*arrays)
    rows = "data" if "data" in mesh.axis_names else None
    tensor = mesh.shape.get("tensor", 1)
    cut = PartitionSpec(rows, "tensor" if tensor > 1 and heads % tensor == 0 else None)

    def place(x: Array) -> PartitionSpec:
        return cut if x.ndim > 2 else PartitionSpec(rows) if x.ndim else PartitionSpec()

    return jax.shard_map(attention, mesh=mesh, in_specs=jax.tree.map(place, arrays), out_specs=cut)(*arrays)


def rearranged(x: Array, order: Array | None, shape: tuple[int, ...]) -> Array:
    """x[order] along the first axis, or x as it is for None, its first axes in another shape."""
    x = x if order is None else x[order]
    return x.reshape(*shape, *x.shape[1:])


def two_part_attention(
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
    mesh: Mesh | None = None,
) -> tuple[Array, LayerCache]:
    """Each row's newest token, q [B, 1, H, h], at its prompt and at its own tokens; and the ring with its k, v.

    k, v: [B, 1, K, h]; they are written to column step mod S of the ring. lanes: None where row b stands in lane b;
    count, position: int32[B]; length: int32[P], of the prompts. mesh: over which rows, prompts and heads are cut, if
    they are. The result is [B, 1, H, h].
    """
    B, _, H, h = q.shape
    P, K = prefix.keys.shape[:2]
    W = (B if lanes is None else lanes.row.shape[0]) // P
    q = q.reshape(B, K, H // K, h)
    order, back = (None, None) if lanes is None else (lanes.row, lanes.of_row)
    of_lanes = rearranged(q, order, (P, W)).swapaxes(1, 2)  # [P, K, W, R, h]
    numbers: Any = {"query_scale": config.query_scale, "softcap": config.attention_softcap, "window": window}

    def at_prompts(q: Array, cache: LayerCache, length: Array, position: Array) -> Part:
        keys, values, key_scale, value_scale = cache
        return decode_attention(
            q, keys, values, length, position, key_scale=key_scale, value_scale=value_scale, **numbers
        )

    def at_own(
        q: Array, new: LayerCache, cache: LayerCache, count: Array, step: Array, prompt: Part
    ) -> tuple[Array, LayerCache]:
        newest = each(lambda x, axis: jnp.squeeze(x, axis), new)
        found = own_attention(
            q, newest.keys, newest.values, cache.keys, cache.values, count, step, prompt,
            new_scales=scales(newest), scales=scales(cache), **numbers,
        )  # fmt: skip
        return found.result, LayerCache(found.keys, found.values, *(found.scales or (None, None)))

    def rows(x: Array) -> Array:
        """[P, K, W, ...] -> [B, K, ...]"""
        return rearranged(x.swapaxes(1, 2).reshape(P * W, *x.shape[1:2], *x.shape[3:]), back, (B,))

    prompt = on_devices(at_prompts, K, mesh, of_lanes, prefix, length, rearranged(position, order, (P, W)))
    new = pack(k, v, own.keys.dtype)
    y, own = on_devices(at_own, K, mesh, q, new, own, count, step, Part(*map(rows, prompt)))
    return y.reshape(B, 1, H, h), own
