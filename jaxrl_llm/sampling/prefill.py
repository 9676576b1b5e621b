"""Prompts of admitted requests, run through the model once: keys and values for the prefix cache, and first tokens.

`prefill_prompts` pads a batch on the host, calls the compiled program `prefill`, and returns the new cache; the cache
that it takes is donated.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxrl_kernels.partition import mesh_of

from jaxrl_llm.core.shapes import pad_rows
from jaxrl_llm.core.soft_thinking import Mixed
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.by_row import are_by_row, for_rows
from jaxrl_llm.models.layers.attention import Attend, Weighing, attention
from jaxrl_llm.models.layers.packed_attention import LANES, by_kernel, causal_tokens
from jaxrl_llm.models.layers.recurrent import Carried, rows_flow
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards, takes_kernels
from jaxrl_llm.models.placement import between_layers, sampler_placement
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.decode import RingCache, begin, ends_of_prompts, states_of_prompts
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.kv_cache import LayerCache, PrefixCache, PrefixSlots, each, no_experts, pack
from jaxrl_llm.sampling.requests import Prefix
from jaxrl_llm.sampling.rows import RowState
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.two_model_decode import empty_layers, run_both, width
from jaxrl_llm.sampling.weights import Weights

PREFILL_TOKENS = 256  # tokens of prompts in one forward pass, padding included


def prefill_prompts(
    policy: Policy,
    weights: Weights,
    prefix_cache: PrefixCache,
    prompts: Sequence[tuple[int, Prefix]],
    size: Size,
    stats: Stats,
) -> PrefixCache:
    """Run new prompts, pairs of prompt slot and prefix, through the model.

    They are batched by width: the width of the cache, halved as often as the prompt still fits.
    """
    widths: dict[int, list[tuple[int, list[int], int]]] = {}
    for slot, (prompt, adapter) in prompts:
        ids = list(prompt)
        width = size.width
        while width % 2 == 0 and width // 2 >= max(len(ids), 32):
            width //= 2
        widths.setdefault(width, []).append((slot, ids, adapter))
    devices = row_shards(weights.mesh, SAMPLED_ROWS)
    for width, batch in widths.items():
        most = prompts_together(width, size.shape.prompts, devices)
        for first in range(0, len(batch), most):  # of one size for each width: another would be another program
            part = batch[first : first + most]
            padding = most - len(part)
            tokens, _ = pad_rows([ids for _, ids, _ in part] + [[0]] * padding, width)
            length = np.asarray([len(ids) for _, ids, _ in part] + [1] * padding, np.int32)
            into = np.asarray([slot for slot, _, _ in part] + [size.shape.prompts] * padding, np.int32)
            numbers = np.asarray([number for _, _, number in part] + [0] * padding, np.int32)
            arrays = weights.spread((tokens, length, into, numbers if are_by_row(policy, weights.prompts) else None))
            prefix_cache = prefill(policy, weights.prompts, prefix_cache, *arrays)
            stats.prompts += len(part)
            stats.prompt_tokens += sum(len(ids) for _, ids, _ in part)
            stats.padded_tokens += tokens.size
    return prefix_cache


def first_tokens(
    policy: Policy, weights: Weights, prefix_cache: PrefixCache, prefix_slots: PrefixSlots | None,
    ring_cache: RingCache, rows: RowState, settings: DrawSettings,
) -> tuple[RingCache, RowState]:  # fmt: skip
    """The ring KV cache (donated) and the rows, of which fresh ones now have a token, and what their prompts left."""
    if policy.config.recurrent:
        ring_cache = ring_cache._replace(layers=states_of_prompts(prefix_cache, prefix_slots, ring_cache.layers, rows))
    ends = weights.spread(ends_of_prompts(prefix_cache, prefix_slots, rows))
    drawn, rows = begin(policy, weights.loop, ends, ring_cache.drawn, ring_cache.step, rows, settings)
    return ring_cache._replace(drawn=drawn), rows


def prompts_together(width: int, slots: int, devices: int) -> int:
    """How many prompts of a width go through one call. slots: of prompts. devices: over which rows are sharded."""
    most = min(max(PREFILL_TOKENS // width, 1), -(-slots // devices))
    return devices << (most.bit_length() - 1)


def empty_prefix_cache(policy: Policy, prompts: int, length: int, dtype: Any, record: bool = False) -> PrefixCache:
    """An empty prefix cache with slots for `prompts` prompts of at most `length` tokens. record: also their experts."""
    return PrefixCache(
        empty_layers(policy, prompts, length, dtype),
        jnp.zeros(prompts, jnp.int32),
        jnp.zeros((prompts, width(policy)), policy.activation_dtype),
        no_experts(policy.config, prompts, length) if record else None,
    )


@jax.jit(static_argnames=("policy",), donate_argnames=("prefix_cache",))
def prefill(
    policy: Policy,
    params: Params,
    prefix_cache: PrefixCache,
    tokens: Array,
    length: Array,
    into: Array,
    adapter: Array | None = None,
) -> PrefixCache:
    """Run prompts through the model, each once, and write them to prompt slots.

    tokens: int32[R, L], right-padded; length: int32[R]; into: int32[R], prompt slots, where P marks a padding row.
    adapter: int32[R], where weights have adapters by row.
    """
    params = for_rows(policy, params, adapter)
    kept = prefix_cache.experts
    hidden, kvs, experts = causal_pass(policy, params, tokens, length, kept is not None)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]

    @jax.jit  # traced once for all layers of a shape
    def put(store: LayerCache | Carried, kv: Any) -> LayerCache | Carried:
        if isinstance(store, Carried):
            return jax.tree.map(lambda old, x: old.at[into].set(x.astype(old.dtype), mode="drop"), store, kv)
        S = store.values.shape[2]
        if tokens.shape[1] > S:  # a layer with a window stores the last S tokens
            at = jnp.maximum(length - S, 0)[:, None] + jnp.arange(S)
            kv = tuple(jnp.take_along_axis(x, at[:, :, None, None], axis=1) for x in kv)
        new = pack(kv[0], kv[1], store.keys.dtype)

        def at_slots(old: Array, x: Array, axis: int) -> Array:
            place: list[Any] = [slice(None)] * old.ndim
            place[0], place[axis] = into, slice(x.shape[axis])
            return old.at[tuple(place)].set(x, mode="drop")

        return each(at_slots, store, new)

    stores = enumerate(prefix_cache.layers)
    layers = tuple(None if store is None else put(store, of_layer(kvs, number)) for number, store in stores)
    return PrefixCache(
        layers,
        prefix_cache.length.at[into].set(length, mode="drop"),
        prefix_cache.hidden.at[into].set(last, mode="drop"),
        None if kept is None else kept.at[into, : tokens.shape[1]].set(experts, mode="drop"),
    )


def causal_pass(
    policy: Policy, params: Params, tokens: Array, length: Array, record: bool = False, mixed: Mixed | None = None
) -> tuple[Array, Any, Any]:
    """Hidden states [R, L, D] (of two policies [R, L, 2 D]), keys (after RoPE) and values [R, L, K, h] of layers, and
    experts int[R, L, layers, k], None unless they are to be recorded.

    tokens: int32[R, L], right-padded; length: int32[R]. Long rows take the attention kernel where there is one. mixed:
    see `decoder.run`.
    """
    R, L = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(L), (R, L))
    config, attention, placed = (
        policy.config,
        _dense(policy, positions, length),
        sampler_placement(policy.config, policy.mesh),
    )
    if takes_kernels(policy.mesh) and L % LANES == 0:
        # The mesh of the sampler is that of the arrays: it may be one host's.
        attention = by_kernel(config, causal_tokens(length, L), L * (L + 1) // 2, None, SAMPLED_ROWS)
        placed = between_layers(placed, mesh_of(None, tokens), R, L)

    def attend(q: Array, k: Array, v: Array, memory: None, how: Weighing) -> tuple[Array, tuple[Array, Array]]:
        return attention(q, k, v, None, how)[0], (k, v)

    flow = rows_flow(length) if config.recurrent else None
    beside: dict[str, Any] = {"record": record, "placement": placed, "flow": flow, "mixed": mixed}
    hidden, kvs = run_both(policy, params, tokens, positions, attend, **beside)
    return (hidden, *kvs) if record else (hidden, kvs, None)


def _dense(policy: Policy, positions: Array, length: Array) -> Attend:
    """Attention by a mask of all pairs of tokens. positions: int32[R, L]; length: int32[R]."""
    config = policy.config
    seen = (positions < length[:, None])[:, None, :] & (positions[:, :, None] >= positions[:, None, :])
    distance = positions[:, :, None] - positions[:, None, :]

    def attend(q: Array, k: Array, v: Array, memory: Any, how: Weighing) -> tuple[Array, None]:
        near = seen & ((distance < how.window) | (how.window == 0)) if any(config.window_of_layer) else seen
        return attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), near, how), None

    return attend


def of_layer(kvs: Any, number: int) -> tuple[Array, Array]:
    """Keys and values of one layer, given a tuple of pairs or a pair of stacked arrays."""
    return kvs[number] if isinstance(kvs[0], tuple) else (kvs[0][number], kvs[1][number])
