"""Forward passes that fill the caches: prompts, and the tokens of completions that are continued."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.cache import LayerCache, PrefixCache, each, empty, pack

Array = jax.Array


def empty_prefix_cache(policy: Policy, prompts: int, length: int, dtype: Any) -> PrefixCache:
    """An empty prefix cache with slots for `prompts` prompts of at most `length` tokens."""
    return PrefixCache(
        empty(policy.config, prompts, length, dtype),
        jnp.zeros(prompts, jnp.int32),
        jnp.zeros((prompts, policy.config.hidden_size), policy.dtype),
    )


@jax.jit(static_argnames=("policy",), donate_argnames=("prefix_cache",))
def prefill(
    policy: Policy, params: Params, prefix_cache: PrefixCache, tokens: Array, length: Array, into: Array
) -> PrefixCache:
    """Run prompts through the model, each once, and write them to prompt slots.

    tokens: int32[R, L], right-padded; length: int32[R]; into: int32[R], prompt slots, where P marks a padding row.
    """
    hidden, kvs = _forward(policy, params, tokens, length)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]

    def put(store: LayerCache, number: int, kv: tuple[Array, Array]) -> LayerCache:
        S = store.values.shape[2]
        if tokens.shape[1] > S:  # a layer with a window stores the last S tokens
            at = jnp.maximum(length - S, 0)[:, None] + jnp.arange(S)
            kv = tuple(jnp.take_along_axis(x, at[:, :, None, None], axis=1) for x in kv)  # type: ignore[assignment]
        new = pack(*kv, store.keys.dtype)

        def at_slots(old: Array, x: Array, axis: int) -> Array:
            place: list[Any] = [slice(None)] * old.ndim
            place[0], place[axis] = into, slice(x.shape[axis])
            return old.at[tuple(place)].set(x, mode="drop")

        return each(at_slots, store, new)

    layers = tuple(put(store, i, _layer(kvs, i)) for i, store in enumerate(prefix_cache.layers))
    return PrefixCache(
        layers,
        prefix_cache.length.at[into].set(length, mode="drop"),
        prefix_cache.hidden.at[into].set(last, mode="drop"),
    )


@jax.jit(static_argnames=("policy",), donate_argnames=("ring_layers",))
def restore(
    policy: Policy,
    params: Params,
    ring_layers: tuple[LayerCache, ...],
    tokens: Array,
    length: Array,
    prompt: Array,
    into: Array,
    step: Array,
) -> tuple[LayerCache, ...]:
    """Write the own tokens of continued completions to the ring KV cache, as if they were drawn just before `step`.

    tokens: int32[R, L], prompt and own tokens, right-padded; length: int32[R], of both together; prompt: int32[R],
    length of the prompt; into: int32[R], rows. The keys of own tokens depend on the prompt, so both are recomputed.
    """
    _, kvs = _forward(policy, params, tokens, length)
    own = length - prompt

    def put(store: LayerCache, number: int) -> LayerCache:
        S = store.values.shape[2]
        # Column c holds the token `age` before the newest one; columns older than the first own token are unused.
        age = (step - 1 - jnp.arange(S)) % S
        at = jnp.clip(prompt[:, None] + own[:, None] - 1 - age, 0, tokens.shape[1] - 1)
        k, v = (jnp.take_along_axis(x, at[:, :, None, None], axis=1) for x in _layer(kvs, number))
        return each(lambda old, x, _: old.at[into].set(x, mode="drop"), store, pack(k, v, store.keys.dtype))

    return tuple(put(store, number) for number, store in enumerate(ring_layers))


@jax.jit(static_argnames=("policy",), donate_argnames=("ring_layers",))
def extend(
    policy: Policy,
    params: Params,
    prefix_cache: PrefixCache,
    ring_layers: tuple[LayerCache, ...],
    tokens: Array,
    usable: Array,
    own: Array,
    shift: Array,
    source: Array,
    into: Array,
    slot: Array,
    step: Array,
) -> tuple[LayerCache, ...]:
    """Continue completions whose first own tokens are still in the ring KV cache: copy those, recompute the others.

    tokens: int32[R, M], the own tokens to recompute, right-padded. usable: int32[R], the number of own tokens before
    them, which are copied from the rows `source`, int32[R], moved by `shift`, int32[R], columns. own: int32[R], own
    tokens in the cache afterwards. into, slot: int32[R], row and prompt slot of each request, where row B marks a
    padding row. params: those of the decode loop.
    """
    M = tokens.shape[1]
    positions = prefix_cache.length[slot][:, None] + usable[:, None] + jnp.arange(M)

    def attend(q: Array, k: Array, v: Array, memory: Any, window: Any) -> tuple[Array, LayerCache]:
        store, prefix = memory
        S, P = store.values.shape[2], prefix.values.shape[2]
        column = jnp.arange(S)[None]
        first = (step - own - shift)[:, None]  # column (mod S) of the source row's first own token
        # The S tokens before the new ones, in order: no query attends to older ones.
        old = usable[:, None] - S + column
        seen_before = each(lambda x, axis: _take(x[source], (first + old) % S, axis), store)
        at_prompt = jnp.arange(P)[None] + jnp.maximum(prefix_cache.length[slot] - P, 0)[:, None]
        places = jnp.concatenate([at_prompt, prefix_cache.length[slot][:, None] + old, positions], axis=1)
        real = jnp.concatenate([
            at_prompt < prefix_cache.length[slot][:, None], old >= 0, jnp.arange(M)[None] < (own - usable)[:, None],
        ], axis=1)  # fmt: skip
        distance = positions[:, :, None] - places[:, None, :]
        seen = real[:, None, :] & (distance >= 0) & ((distance < window) | (window == 0))
        new = pack(k, v, store.keys.dtype)
        keys, values = (
            jnp.concatenate([each_x.astype(q.dtype) for each_x in parts], axis=2)
            for parts in zip(_plain(each(lambda x, _: x[slot], prefix)), _plain(seen_before), _plain(new), strict=True)
        )
        y = decoder.attention(q, keys, values, seen, policy.config)
        index = own[:, None] - 1 - (step - 1 - column) % S  # own token in each column afterwards
        at_new = jnp.clip(index - usable[:, None], 0, M - 1)

        def merged(old: Array, x: Array, axis: int) -> Array:
            place = jnp.expand_dims(index >= usable[:, None], tuple(a for a in range(1, old.ndim) if a != axis))
            return jnp.where(place, _take(x, at_new, axis), old)

        copied = each(lambda x, axis: _take(x[source], (first + index) % S, axis), store)
        return y, each(merged, copied, new)

    memory = tuple(zip(ring_layers, prefix_cache.layers, strict=True))
    _, rows = policy.run(params, tokens, positions, attend, memory)
    return tuple(
        each(lambda old, x, _: old.at[into].set(x, mode="drop"), store, new)
        for store, new in zip(ring_layers, rows, strict=True)
    )


def _take(x: Array, columns: Array, axis: int) -> Array:
    """x[r, ..., columns[r], ...] along an axis; columns: int32[R, S]."""
    return jnp.take_along_axis(x, jnp.expand_dims(columns, tuple(a for a in range(1, x.ndim) if a != axis)), axis=axis)


def _plain(cache: LayerCache) -> tuple[Array, Array]:
    """Keys and values [R, K, S, h] of a cache, dequantised if it is int8."""
    keys, values = cache.keys.swapaxes(2, 3), cache.values
    if cache.key_scale is None or cache.value_scale is None:
        return keys, values
    return keys * cache.key_scale[..., None], values * cache.value_scale[..., None]


def _forward(policy: Policy, params: Params, tokens: Array, length: Array) -> tuple[Array, Any]:
    """Hidden states [R, L, D], and the keys (after RoPE) and values [R, L, K, h] of every layer."""
    R, L = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(L), (R, L))
    real = positions < length[:, None]
    config = policy.config
    seen = real[:, None, :] & (positions[:, :, None] >= positions[:, None, :])
    distance = positions[:, :, None] - positions[:, None, :]

    def attend(q: Array, k: Array, v: Array, memory: None, window: Any) -> tuple[Array, tuple[Array, Array]]:
        near = seen & ((distance < window) | (window == 0)) if any(config.window_of_layer) else seen
        y = decoder.attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), near, config)
        return y, (k, v)

    return policy.run(params, tokens, positions, attend)


def _layer(kvs: Any, number: int) -> tuple[Array, Array]:
    """Keys and values of one layer, given a tuple of pairs or a pair of stacked arrays."""
    if isinstance(kvs[0], tuple):
        return kvs[number]
    return kvs[0][number], kvs[1][number]
