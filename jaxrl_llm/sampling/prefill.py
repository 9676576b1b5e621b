"""Prompts into the cache: each goes through the model once, whatever number of rows continue it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.cache import LayerCache, Prefixes, each, empty, pack

Array = jax.Array


def empty_prefixes(policy: Policy, prompts: int, length: int, dtype: Any) -> Prefixes:
    """Slots for so many prompts of at most `length` tokens."""
    return Prefixes(
        empty(policy.config, prompts, length, dtype),
        jnp.zeros(prompts, jnp.int32),
        jnp.zeros((prompts, policy.config.hidden_size), policy.dtype),
    )


@jax.jit(static_argnames=("policy",), donate_argnames=("prefixes",))
def prefill(policy: Policy, params: Params, prefixes: Prefixes, tokens: Array, length: Array, into: Array) -> Prefixes:
    """Put prompts into slots. tokens: int32[R, L], right-padded; length, into: int32[R]; a slot beyond all is none."""
    hidden, kvs = _through(policy, params, tokens, length)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]

    def put(store: LayerCache, number: int, kv: tuple[Array, Array]) -> LayerCache:
        S = store.values.shape[2]
        if tokens.shape[1] > S:  # of a layer with a window: the last S
            at = jnp.maximum(length - S, 0)[:, None] + jnp.arange(S)
            kv = tuple(jnp.take_along_axis(x, at[:, :, None, None], axis=1) for x in kv)  # type: ignore[assignment]
        new = pack(*kv, store.keys.dtype)

        def at_slots(old: Array, x: Array, axis: int) -> Array:
            place: list[Any] = [slice(None)] * old.ndim
            place[0], place[axis] = into, slice(x.shape[axis])
            return old.at[tuple(place)].set(x, mode="drop")

        return each(at_slots, store, new)

    layers = tuple(put(store, i, _layer(kvs, i)) for i, store in enumerate(prefixes.layers))
    return Prefixes(
        layers,
        prefixes.length.at[into].set(length, mode="drop"),
        prefixes.hidden.at[into].set(last, mode="drop"),
    )


@jax.jit(static_argnames=("policy",), donate_argnames=("ring",))
def restore(
    policy: Policy,
    params: Params,
    ring: tuple[LayerCache, ...],
    tokens: Array,
    length: Array,
    prompt: Array,
    into: Array,
    step: Array,
) -> tuple[LayerCache, ...]:
    """Put the own tokens of rows that were begun before into their rings, as if the steps before `step` had drawn them.

    tokens: int32[R, L], prompt and own tokens, right-padded; length: int32[R], of both; prompt: int32[R], of prompts;
    into: int32[R], the rows. The prompt goes through the model again: its keys depend on the weights too.
    """
    _, kvs = _through(policy, params, tokens, length)
    own = length - prompt

    def put(store: LayerCache, number: int) -> LayerCache:
        S = store.values.shape[2]
        # Column c holds the token `age` before the newest one; older than the first own token is nothing's.
        age = (step - 1 - jnp.arange(S)) % S
        at = jnp.clip(prompt[:, None] + own[:, None] - 1 - age, 0, tokens.shape[1] - 1)
        k, v = (jnp.take_along_axis(x, at[:, :, None, None], axis=1) for x in _layer(kvs, number))
        return each(lambda old, x, _: old.at[into].set(x, mode="drop"), store, pack(k, v, store.keys.dtype))

    return tuple(put(store, number) for number, store in enumerate(ring))


def _through(policy: Policy, params: Params, tokens: Array, length: Array) -> tuple[Array, Any]:
    """Hidden states [R, L, D] and every layer's rotated keys and values [R, L, K, h]."""
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
    """Keys and values of one layer, from layers in a tuple of pairs or stacked in a pair of arrays."""
    if isinstance(kvs[0], tuple):
        return kvs[number]
    return kvs[0][number], kvs[1][number]
