"""Rows that continue completions: their keys and values are copied within the ring KV cache, or computed again.

`extend_rows` and `restore_rows` pad a batch on the host, call the compiled program `extend` or `restore`, and return
the new cache; the cache that they take is donated.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.shapes import bucket, pad_rows
from jaxrl_llm.core.soft_thinking import mixture
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.by_row import for_rows
from jaxrl_llm.models.layers.attention import Weighing, attention
from jaxrl_llm.models.layers.recurrent import Carried, rows_flow
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.capacity import Shape
from jaxrl_llm.sampling.decode import RingCache, narrowed
from jaxrl_llm.sampling.kv_cache import LayerCache, PrefixCache, each, pack, take_columns
from jaxrl_llm.sampling.prefill import causal_pass, of_layer
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.resume.kv_offload import Reused, Store, place_rows
from jaxrl_llm.sampling.sampled_tokens import thoughts_of
from jaxrl_llm.sampling.scheduler import Assignment
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.two_model_decode import run_both
from jaxrl_llm.sampling.weights import Weights


class Resuming(NamedTuple):
    """What the rows of an engine that continue completions have in common."""

    policy: Policy
    weights: Weights
    prefix_cache: PrefixCache
    requests: Mapping[int, Request]
    shape: Shape
    stats: Stats


def resume_rows(
    of: Resuming, store: Store, ring_cache: RingCache, begun: list[Assignment], assigned: list[Assignment],
    steps: int, columns: int,
) -> RingCache:  # fmt: skip
    """The ring KV cache with the rows that begin with tokens; see `kv_offload.place_rows`."""
    extended = partial(extend_rows, of)
    ring_cache, missed = place_rows(store, ring_cache, begun, of.requests, steps, columns, extended, assigned)
    return restore_rows(of, ring_cache, missed)


def extend_rows(of: Resuming, ring_cache: RingCache, reused: Sequence[tuple[Assignment, Reused]]) -> RingCache:
    """Copy the keys and values that the ring KV cache still holds, and run the remaining tokens through the model."""
    if not reused:
        return ring_cache
    policy, weights, prefix_cache, requests, shape, stats = of
    begun = [requests[place.request].begun for place, _ in reused]
    ids = [tokens.token[how.usable : -1].tolist() for tokens, (_, how) in zip(begun, reused, strict=True)]
    padding = bucket(len(reused), 1, 1) - len(reused)
    tokens, _ = pad_rows(ids + [[0]] * padding, bucket(max(map(len, ids)), least=8))
    columns = {
        "usable": [how.usable for _, how in reused] + [0] * padding,
        "own": [tokens.size - 1 for tokens in begun] + [1] * padding,
        "shift": [how.shift for _, how in reused] + [0] * padding,
        "source": [how.source for _, how in reused] + [0] * padding,
        "into": [place.row for place, _ in reused] + [shape.rows] * padding,
        "slot": [place.prefix_slot // shape.slots_per_prompt for place, _ in reused] + [0] * padding,
        "adapter": [requests[place.request].adapter for place, _ in reused] + [0] * padding,
    }
    arrays: dict[str, Any] = {name: np.asarray(values, np.int32) for name, values in columns.items()}
    into = arrays.pop("into")
    params = narrowed(policy, weights.loop)
    drawn = ring_cache.drawn
    held = ring_cache.layers, drawn.experts
    rows = extend(policy, params, prefix_cache, *held, tokens, *arrays.values(), ring_cache.step)
    layers, experts = put_rows(held, rows, into)
    stats.reused_tokens += sum(how.usable for _, how in reused)
    stats.continued_tokens += sum(map(len, ids))
    stats.padded_tokens += tokens.size
    return ring_cache._replace(layers=layers, drawn=drawn._replace(experts=experts))


def restore_rows(of: Resuming, ring_cache: RingCache, assigned: Sequence[Assignment]) -> RingCache:
    """Recompute the keys and values of continued completions under these weights, RESTORE_ROWS rows at a time."""
    policy, weights, _, requests, shape, stats = of
    for start in range(0, len(assigned), RESTORE_ROWS):
        part = assigned[start : start + RESTORE_ROWS]
        ids = [[*requests[p.request].prompt, *requests[p.request].begun.token[:-1].tolist()] for p in part]
        padding = bucket(len(part), 1, 1) - len(part)
        tokens, _ = pad_rows(ids + [[0]] * padding, bucket(max(map(len, ids)), least=32))
        length = np.asarray([len(row) for row in ids] + [1] * padding, np.int32)
        prompt = np.asarray([len(requests[p.request].prompt) for p in part] + [1] * padding, np.int32)
        into = np.asarray([p.row for p in part] + [shape.rows] * padding, np.int32)
        adapter = np.asarray([requests[p.request].adapter for p in part] + [0] * padding, np.int32)
        drawn, thoughts = ring_cache.drawn, None
        if policy.thinking is not None:
            begun = [(len(requests[p.request].prompt), requests[p.request].begun) for p in part]
            thoughts = thoughts_of(policy.thinking, begun, *tokens.shape)
        layers, experts = restore(
            policy, weights.prompts, ring_cache.layers, drawn.experts, tokens, length, prompt, into, ring_cache.step,
            adapter, thoughts,
        )  # fmt: skip
        ring_cache = ring_cache._replace(layers=layers, drawn=drawn._replace(experts=experts))
        stats.continued_tokens += sum(map(len, ids))
        stats.padded_tokens += tokens.size
    return ring_cache


RESTORE_ROWS = 8  # rows restored in one forward pass


@jax.jit(static_argnames=("policy",), donate_argnames=("ring_layers", "ring_experts"))
def restore(
    policy: Policy,
    params: Params,
    ring_layers: tuple[Any, ...],
    ring_experts: Array | None,
    tokens: Array,
    length: Array,
    prompt: Array,
    into: Array,
    step: Array,
    adapter: Array,
    thoughts: Any = None,
) -> tuple[tuple[Any, ...], Array | None]:
    """Write the own tokens of continued completions to the ring KV cache, as if they were drawn just before `step`.

    tokens: int32[R, L], prompt and own tokens, right-padded; length: int32[R], of both together; prompt: int32[R],
    length of the prompt; into: int32[R], rows. The keys of own tokens depend on the prompt, so both are recomputed.
    ring_experts: `Drawn.experts` of the ring KV cache. adapter: int32[R], see `models.by_row`. thoughts:
    f32[R, L, 3, K], records of soft tokens, of a policy that thinks so.
    """
    params = for_rows(policy, params, adapter)
    mixed = None if policy.thinking is None else mixture(policy.thinking, thoughts)
    _, kvs, experts = causal_pass(policy, params, tokens, length, ring_experts is not None, mixed)
    own = length - prompt

    def columns(S: int) -> Array:
        # Column c holds the token `age` before the newest one; columns older than the first own token are unused.
        age = (step - 1 - jnp.arange(S)) % S
        return jnp.clip(prompt[:, None] + own[:, None] - 1 - age, 0, tokens.shape[1] - 1)

    def put(store: LayerCache | Carried | None, number: int) -> LayerCache | Carried | None:
        if store is None:
            return None
        if isinstance(store, Carried):
            new = of_layer(kvs, number)
            return jax.tree.map(lambda old, x: old.at[into].set(x.astype(old.dtype), mode="drop"), store, new)
        at = columns(store.values.shape[2])
        k, v = (jnp.take_along_axis(x, at[:, :, None, None], axis=1) for x in of_layer(kvs, number))
        return each(lambda old, x, _: old.at[into].set(x, mode="drop"), store, pack(k, v, store.keys.dtype))

    if ring_experts is not None:  # those of a token are with the one after it, in the column of its key
        ring_experts = ring_experts.at[into].set(take_columns(experts, columns(ring_experts.shape[1]), 1), mode="drop")
    return tuple(put(store, number) for number, store in enumerate(ring_layers)), ring_experts


@jax.jit(static_argnames=("policy",))
def extend(
    policy: Policy,
    params: Params,
    prefix_cache: PrefixCache,
    ring_layers: tuple[Any, ...],
    ring_experts: Array | None,
    tokens: Array,
    usable: Array,
    own: Array,
    shift: Array,
    source: Array,
    slot: Array,
    adapter: Array,
    step: Array,
) -> tuple[tuple[Any, ...], Array | None]:
    """Continue completions whose first own tokens are still in the ring KV cache: copy those, recompute the others.

    tokens: int32[R, M], the own tokens to recompute, right-padded. usable: int32[R], the number of own tokens before
    them, which are copied from the rows `source`, int32[R], moved by `shift`, int32[R], columns. own: int32[R], own
    tokens in the cache afterwards. slot: int32[R], prompt slot of each request. adapter: int32[R],
    its adapter. params: those of the decode loop.
    ring_experts: `Drawn.experts` of the ring KV cache.

    Returns the new rows, which `put_rows` writes: a program that read and wrote the cache would copy all of it.
    """
    params, M = for_rows(policy, params, adapter), tokens.shape[1]
    positions = prefix_cache.length[slot][:, None] + usable[:, None] + jnp.arange(M)

    def attend(q: Array, k: Array, v: Array, memory: Any, how: Weighing) -> tuple[Array, LayerCache]:
        store, prefix = memory
        S, P = store.values.shape[2], prefix.values.shape[2]
        column = jnp.arange(S)[None]
        first = (step - own - shift)[:, None]  # column (mod S) of the source row's first own token
        # The S tokens before the new ones, in order: no query attends to older ones.
        old = usable[:, None] - S + column
        seen_before = each(lambda x, axis: take_columns(x[source], (first + old) % S, axis), store)
        at_prompt = jnp.arange(P)[None] + jnp.maximum(prefix_cache.length[slot] - P, 0)[:, None]
        places = jnp.concatenate([at_prompt, prefix_cache.length[slot][:, None] + old, positions], axis=1)
        real = jnp.concatenate([
            at_prompt < prefix_cache.length[slot][:, None], old >= 0, jnp.arange(M)[None] < (own - usable)[:, None],
        ], axis=1)  # fmt: skip
        distance = positions[:, :, None] - places[:, None, :]
        seen = real[:, None, :] & (distance >= 0) & ((distance < how.window) | (how.window == 0))
        new = pack(k, v, store.keys.dtype)
        keys, values = (
            jnp.concatenate([each_x.astype(q.dtype) for each_x in parts], axis=2)
            for parts in zip(_plain(each(lambda x, _: x[slot], prefix)), _plain(seen_before), _plain(new), strict=True)
        )
        y = attention(q, keys, values, seen, how)
        index = own[:, None] - 1 - (step - 1 - column) % S  # own token in each column afterwards
        at_new = jnp.clip(index - usable[:, None], 0, M - 1)

        def merged(old: Array, x: Array, axis: int) -> Array:
            place = jnp.expand_dims(index >= usable[:, None], tuple(a for a in range(1, old.ndim) if a != axis))
            return jnp.where(place, take_columns(x, at_new, axis), old)

        copied = each(lambda x, axis: take_columns(x[source], (first + index) % S, axis), store)
        return y, each(merged, copied, new)

    memory = tuple(
        jax.tree.map(lambda x: x[source], store) if isinstance(store, Carried) else (store, prefix)
        for store, prefix in zip(ring_layers, prefix_cache.layers, strict=True)
    )
    flow = rows_flow(own - usable)
    _, rows = run_both(policy, params, tokens, positions, attend, memory, record=ring_experts is not None, flow=flow)
    if ring_experts is not None:
        rows, experts = rows
        T = ring_experts.shape[1]
        index = own[:, None] - 1 - (step - 1 - jnp.arange(T)[None]) % T
        copied = take_columns(ring_experts[source], ((step - own - shift)[:, None] + index) % T, 1)
        fresh = take_columns(experts, jnp.clip(index - usable[:, None], 0, M - 1), 1)
        ring_experts = jnp.where((index >= usable[:, None])[:, :, None, None], fresh, copied)
    return tuple(rows), ring_experts


@jax.jit(donate_argnames=("cache",))
def put_rows(cache: Any, rows: Any, into: Array) -> Any:
    """Write rows, arrays [R, ...], to the rows `into`, int32[R], of a cache, arrays [B, ...]; row B marks padding."""
    return jax.tree.map(lambda old, x: old.at[into].set(x.astype(old.dtype), mode="drop"), cache, rows)


def _plain(cache: LayerCache) -> tuple[Array, Array]:
    """Keys and values [R, K, S, h] of a cache, dequantised if it has scales."""
    keys, values = cache.keys.swapaxes(2, 3), cache.values
    if cache.key_scale is None or cache.value_scale is None:
        return keys, values
    keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    return keys * cache.key_scale[..., None], values * cache.value_scale[..., None]
