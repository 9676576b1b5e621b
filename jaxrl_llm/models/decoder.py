"""One decoder for every supported family: pure functions over a pytree of weights.

N rows, L tokens, S cache slots, D hidden, H query heads, K key-value heads, h head size, F inner size, E experts.

Parameters: {"embed": [V, D], "final_norm": [D], "unembed": [V, D] unless tied, "layers": ...} where the layers
are either one dict of arrays with a leading layer axis (scanned: compile time does not grow with depth) or a
tuple of dicts (unrolled: no copy of a layer's weights per step; see `unstack`). The structure decides. A layer may hold
low-rank adapters of its projections too (`lora`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import accumulation_dtype, project, rms_norm, rotate, rotation, scores, softmax
from jaxrl_llm.models.moe import expert_mlp
from jaxrl_llm.models.placement import ANYWHERE, Placement, all_but_weights
from jaxrl_llm.models.quantised import cast, straight_through_layer

Params = dict[str, Any]
# Whether layers are recomputed in the backward pass; or what of them is saved, one of jax.checkpoint_policies.
Remat = bool | Callable[..., bool]
OfBlock = tuple[Any, Callable[[Any], jax.Array]]  # see `attention`
MASKED = -1e30  # finite, so that a row in which everything is masked stays finite
MAX_LOGITS = 2**28  # of attention at a time: a gibibyte of float32


class Cache(NamedTuple):
    """Keys and values of the tokens so far. Slots fill from the left; rows may leave gaps (segment 0)."""

    keys: Any  # like the layers: [n, N, K, S, h] or a tuple of [N, K, S, h]
    values: Any
    positions: jax.Array  # int32[N, S]
    segments: jax.Array  # int32[N, S], 0 where a slot holds nothing
    length: jax.Array  # int32[]: the next slot


def empty_cache(config: ModelConfig, rows: int, slots: int, dtype: Any, stacked: bool = False) -> Cache:
    """An empty cache for `slots` tokens a row."""
    shape = (rows, config.num_kv_heads, slots, config.head_dim)

    def zeros() -> Any:
        if stacked:
            return jnp.zeros((config.num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    marks = jnp.zeros((rows, slots), jnp.int32)
    return Cache(zeros(), zeros(), marks, marks, jnp.int32(0))


def unstack(params: Params) -> Params:
    """The same parameters with one dict a layer. Inside jit this copies the weights once."""
    layers = params["layers"]
    if isinstance(layers, tuple):
        return params
    count = jax.tree.leaves(layers)[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count))}


@jax.named_scope("norm")
def norm(x: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    """`rms_norm` as the configuration has it."""
    return rms_norm(x, weight, config.norm_epsilon, config.norm_offset)


@jax.named_scope("attention")
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, config: ModelConfig, of_block: OfBlock | None = None
) -> jax.Array:
    """Grouped-query attention: q [N, L, H, h], k and v [N, K, S, h], visible bool[N, L, S] -> [N, L, H, h].

    Many queries are taken in blocks, whose logits are recomputed in the backward pass. of_block: arrays [N, L, ...] of
    queries, and the function that makes `visible` from them: for blocks of queries the whole is not made.
    """
    N, L, H, h = q.shape
    blocks = -(-N * H * L * k.shape[2] // MAX_LOGITS)
    size = 128 * -(-L // (128 * blocks))
    if size >= L:
        return _attention(q, k, v, visible, config)
    count = -(-L // size)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - L)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(N, count, size, *x.shape[2:]).swapaxes(0, 1)

    of, sees = of_block or (visible, lambda each: each)
    block = jax.checkpoint(lambda each: _attention(each[0], k, v, sees(each[1]), config), prevent_cse=False)
    found = jax.lax.map(block, (cut(q), jax.tree.map(cut, of)))
    return found.swapaxes(0, 1).reshape(N, count * size, H, h)[:, :L]


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, config: ModelConfig) -> jax.Array:
    N, L, H, h = q.shape
    K = k.shape[1]
    q = q.reshape(N, L, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(N, K, -1, h)
    logits = scores(q, k) * config.query_scale
    if config.attention_softcap:
        logits = config.attention_softcap * jnp.tanh(logits / config.attention_softcap)
    logits = jnp.where(visible[:, None, None], logits.reshape(N, K, H // K, L, -1), MASKED)
    weights = softmax(logits).astype(v.dtype).reshape(N, K, (H // K) * L, -1)
    out = jnp.einsum("nkqs,nksh->nkqh", weights, v)
    return out.reshape(N, K, H // K, L, h).transpose(0, 3, 1, 2, 4).reshape(N, L, H, h)


@jax.named_scope("mlp")
def mlp(
    x: jax.Array, layer: Params, config: ModelConfig, placement: Placement = ANYWHERE,
    experts: jax.Array | None = None, record: bool = False,
) -> Any:  # fmt: skip
    """Gated MLP, [N, L, D] -> [N, L, D]; a mixture of experts where the configuration has experts.

    experts, record: see `moe.expert_mlp`.
    """
    if config.num_experts:
        return expert_mlp(x, layer, config, _activation(config), placement.routed, experts, record)
    gate, up = (project(x, layer[name], layer, name, name in placement.joined) for name in ("gate", "up"))
    if config.mlp_bias:
        gate, up = gate + layer["gate_bias"], up + layer["up_bias"]
    gate, up = placement.units(gate), placement.units(up)
    inner = placement.units(_activation(config)(gate) * up)
    out = project(inner, layer["down"], layer, "down", "down" in placement.joined)
    return out + layer["down_bias"] if config.mlp_bias else out


def _activation(config: ModelConfig) -> Any:
    if config.activation == "silu":
        return jax.nn.silu
    return lambda x: jax.nn.gelu(x, approximate=config.activation == "gelu_pytorch_tanh")


@jax.named_scope("projection")
def _project(x: jax.Array, layer: Params, name: str, bias: bool, joined: bool) -> jax.Array:
    heads, h = layer[name].shape[1:]
    out = project(x, layer[name], layer, name, joined).reshape(*x.shape[:2], heads, h)
    return out + layer[name + "_bias"] if bias else out


@jax.named_scope("projection")
def _project_out(y: jax.Array, layer: Params, bias: bool, joined: bool) -> jax.Array:
    y = y.reshape(*y.shape[:2], -1)
    out = project(y, layer["out"], layer, "out", joined)
    return out + layer["out_bias"] if bias else out


@jax.named_scope("embedding")
def _embed(params: Params, config: ModelConfig, tokens: jax.Array, dtype: Any) -> jax.Array:
    x = params["embed"][tokens].astype(dtype)
    return x if config.embedding_scale == 1.0 else x * jnp.asarray(config.embedding_scale, dtype)


def _turned(config: ModelConfig, x: jax.Array, weight: jax.Array | None, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Queries or keys [N, L, heads, h] with their norm, where the model has one, and rotation."""
    return rotate(x if weight is None else norm(x, weight, config), cos, sin)


class Attend(Protocol):
    """Attention of one layer: between its tokens, and to the keys and values that the layer keeps."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, window: Any) -> tuple[jax.Array, Any]:
        """q [N, L, H, h] and k, v [N, L, K, h], rotated -> [N, L, H, h], and the layer's memory afterwards.

        window: how many tokens back the layer sees, its own included; 0 is all. A number, or int32[] in a scan.
        """
        ...


def run(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    memory: Any = None,
    *,
    rotations: tuple[jax.Array, jax.Array] | None = None,
    dtype: Any = None,
    activations: Any = None,
    rounding: str | None = None,
    remat: Remat = False,
    placement: Placement = ANYWHERE,
    experts: jax.Array | None = None,
    record: bool = False,
) -> tuple[jax.Array, Any]:
    """Hidden states after the last norm, [N, L, D], and the layers' memory as `attend` leaves it.

    tokens, positions: int32[N, L]; memory: one pytree a layer, as a tuple where the layers are a tuple, else stacked
    along a leading layer axis (None: there is none). rotations: `rotation` of the positions, where it is
    already computed. placement: how states and weights are sharded. experts: int[N, L, layers, k], of each token in
    each layer of a mixture, see `moe.expert_mlp`. record: the second result is (memory, the experts of each token,
    in the same form). For the other arguments see `forward`.
    """
    dtype = dtype or params["embed"].dtype
    place = placement.states
    x = place(_embed(params, config, tokens, dtype).astype(activations or dtype), False)
    cos, sin = rotations or rotation(config.ropes, config.head_dim, positions, accumulation_dtype(dtype))

    def run_layer(
        x: jax.Array, layer: Params, window: Any, rope: Any, remembered: Any, given: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        layer = straight_through_layer(placement.weights(cast(layer, dtype)), rounding)
        y = place(norm(x, layer["attention_norm"], config), True)
        q, k, v = (
            _project(y, layer, name, config.attention_bias, name in placement.joined)
            for name in ("query", "key", "value")
        )
        q, k = (
            (placement.turned or partial(_turned, config))(x, layer.get(name), cos[rope], sin[rope])
            for x, name in ((q, "query_norm"), (k, "key_norm"))
        )
        q, k, v = map(placement.heads, (q, k, v))
        y, remembered = attend(q, k, v, remembered, window)
        y = _project_out(placement.tokens(y), layer, config.output_bias, "out" in placement.joined)
        if config.post_norms:
            y = norm(y, layer["attention_post_norm"], config)
        x = place(x + y, False)
        y = mlp(place(norm(x, layer["mlp_norm"], config), True), layer, config, placement, given, record)
        if record:
            y, chosen = y
            remembered = (remembered, chosen)
        if config.post_norms:
            y = norm(y, layer["mlp_post_norm"], config)
        return place(x + y, False), remembered

    layers, static = params["layers"], (config.window_of_layer, config.rope_of_layer)
    block: Any = run_layer
    if remat or placement.gathers:
        keep = remat if callable(remat) else None if remat else all_but_weights
        # In unrolled layers common-subexpression elimination would undo the rematerialisation.
        block = jax.checkpoint(run_layer, prevent_cse=isinstance(layers, tuple), policy=keep)
    if isinstance(layers, tuple):
        memories = (None,) * len(layers) if memory is None else memory
        of_layers = (None,) * len(layers) if experts is None else [experts[:, :, i] for i in range(len(layers))]
        block = jax.jit(block, static_argnums=(2, 3))  # traced once for all layers of one kind
        after = []
        for layer, window, rope, remembered, given in zip(layers, *static, memories, of_layers, strict=True):
            x, remembered = block(x, layer, window, rope, remembered, given)
            after.append(remembered)
        memory = tuple(after)
        if record:
            kept, chosen = zip(*after, strict=True)
            memory = kept, jnp.stack(chosen, axis=2)
    else:
        per_layer = tuple(jnp.asarray(s, jnp.int32) for s in static)
        given = None if experts is None else jnp.moveaxis(experts, 2, 0)
        over = (layers, per_layer, memory, given)
        x, memory = jax.lax.scan(lambda x, xs: block(x, xs[0], *xs[1], *xs[2:]), x, over)
        if record:
            memory = memory[0], jnp.moveaxis(memory[1], 0, 2)
    return norm(x, params["final_norm"], config) if config.final_norm else x, memory


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
    tokens (by slot, not by position) of its own segment, and 0 is padding, which nothing sees. Padding may stand
    anywhere. With a cache the tokens are written to its next L slots. Options: `dtype` is that of weights and states
    (default: the parameters'); norms, rotations, attention logits and softmax are float32. `activations` is that of
    states alone. `rounding` rounds projections, see `quantised.KINDS`. `remat` recomputes each layer in the backward
    pass; see `Remat`.
    """
    L = tokens.shape[1]
    if cache is None:
        first, seen_positions, seen_segments = jnp.int32(0), positions, segments
    else:
        first = cache.length
        seen_positions = jax.lax.dynamic_update_slice(cache.positions, positions, (0, first))
        seen_segments = jax.lax.dynamic_update_slice(cache.segments, segments, (0, first))
    slot = first + jnp.arange(L)
    earlier = jnp.arange(seen_positions.shape[1])[None, :] <= slot[:, None]
    same = (segments[:, :, None] == seen_segments[:, None, :]) & (segments[:, :, None] > 0)
    visible = same & earlier
    distance = positions[:, :, None] - seen_positions[:, None, :]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, memory: Any, window: Any) -> tuple[jax.Array, Any]:
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        if memory is not None:
            k = jax.lax.dynamic_update_slice(memory[0], k.astype(memory[0].dtype), (0, 0, first, 0))
            v = jax.lax.dynamic_update_slice(memory[1], v.astype(memory[1].dtype), (0, 0, first, 0))
            memory = (k, v)
        near = visible
        if any(config.window_of_layer):
            near = visible & ((distance < window) | (window == 0))
        return attention(q, k.astype(q.dtype), v.astype(q.dtype), near, config), memory

    stacked = isinstance(params["layers"], dict)
    memory: Any = None
    if cache is not None:
        memory = (cache.keys, cache.values) if stacked else tuple(zip(cache.keys, cache.values, strict=True))
    hidden, memory = run(params, config, tokens, positions, attend, memory, **options)
    if cache is None:
        return hidden, None
    keys, values = memory if stacked else zip(*memory, strict=True)
    return hidden, Cache(keys, values, seen_positions, seen_segments, first + L)
