"""Attention of a layer: queries, keys and values of tokens, and what the tokens that see them make of them.

N rows, L tokens, S cache slots, D hidden, H query heads, K key-value heads, h and g sizes of a key and a value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.delta import in_chunks
from jaxrl_llm.models.layers.parts import Rotations, rms_norm, rotate, scores, softmax, unit_norm
from jaxrl_llm.models.layers.projections import project, project_summed
from jaxrl_llm.models.layers.sink_slots import Slots, prepend_slots
from jaxrl_llm.models.placement import ANYWHERE, Placement

Array = jax.Array
Layer = dict[str, Any]
OfBlock = tuple[Any, Callable[[Any], Array]]  # see `attention`
MASKED = -1e30  # finite, so that a row in which everything is masked stays finite
MAX_LOGITS = 2**28  # of attention at a time: a gibibyte of float32


class Weighing(NamedTuple):
    """How attention of one layer weighs the tokens that it sees."""

    window: Any  # how many tokens back it sees, its own included; 0 is all. A number, or int32[] in a scan
    scale: float  # of the logits
    softcap: float  # 0: none
    sinks: Array | None = None  # [H], a logit of each head beside those of tokens; None: none
    slots: Slots | None = None  # keys and values beside those of tokens, seen by all; None: none


class Attend(Protocol):
    """Attention of one layer: between its tokens, and to the keys and values that the layer keeps."""

    def __call__(self, q: Array, k: Array, v: Array, memory: Any, how: Weighing) -> tuple[Array, Any]:
        """q [N, L, H, h], k [N, L, K, h] and v [N, L, K, g], rotated -> [N, L, H, g], and the layer's memory
        afterwards."""
        ...


@jax.named_scope("norm")
def norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """`rms_norm` as the configuration has it."""
    return rms_norm(x, weight, config.norm_epsilon, config.norm_offset)


@jax.named_scope("attention")
def attention(q: Array, k: Array, v: Array, visible: Array, how: Weighing, of_block: OfBlock | None = None) -> Array:
    """Grouped-query attention: q [N, L, H, h], k [N, K, S, h], v [N, K, S, g], visible bool[N, L, S] -> [N, L, H, g].

    Many queries are taken in blocks, whose logits are recomputed in the backward pass. of_block: arrays [N, L, ...] of
    queries, and the function that makes `visible` from them: for blocks of queries the whole is not made.
    """
    N, L, H, _ = q.shape
    blocks = -(-N * H * L * k.shape[2] // MAX_LOGITS)
    size = 128 * -(-L // (128 * blocks))
    if size >= L:
        return _attention(q, k, v, visible, how)
    count = -(-L // size)
    of, sees = of_block or (visible, lambda each: each)
    block = jax.checkpoint(lambda each: _attention(each[0], k, v, sees(each[1]), how), prevent_cse=False)
    parts = jax.tree.map(lambda x: in_chunks(x, count, size).swapaxes(0, 1), (q, of))
    return jax.lax.map(block, parts).swapaxes(0, 1).reshape(N, count * size, H, -1)[:, :L]


def _attention(q: Array, k: Array, v: Array, visible: Array, how: Weighing) -> Array:
    N, L, H, h = q.shape
    K = k.shape[1]
    if how.slots is not None:
        k, v, visible = prepend_slots(k, v, visible, how.slots)
    q = q.reshape(N, L, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(N, K, -1, h)
    logits = scores(q, k) * how.scale
    if how.softcap:
        logits = how.softcap * jnp.tanh(logits / how.softcap)
    logits = jnp.where(visible[:, None, None], logits.reshape(N, K, H // K, L, -1), MASKED)
    sinks = how.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(logits.dtype).reshape(K, H // K, 1), logits.shape[:-1])
    out = jnp.einsum("nkqs,nksh->nkqh", softmax(logits, sinks).astype(v.dtype).reshape(N, K, (H // K) * L, -1), v)
    return out.reshape(N, K, H // K, L, -1).transpose(0, 3, 1, 2, 4).reshape(N, L, H, -1)


@jax.named_scope("projection")
def project_heads(x: Array, layer: Layer, name: str, placement: Placement) -> Array:
    """[N, L, inputs] -> [N, L, heads, size]"""
    heads, size = layer[name].shape[1:]
    out = project(x, layer[name], layer, name, name in placement.joined).reshape(*x.shape[:2], heads, size)
    bias = layer.get(name + "_bias")
    return out if bias is None else out + bias


class Heads(NamedTuple):
    """What a layer's tokens attend with: queries [N, L, H, h], keys [N, L, K, h] and values [N, L, K, g]."""

    queries: Array
    keys: Array
    values: Array


def heads_of(
    y: Array, layer: Layer, config: ModelConfig, rotations: Rotations, rope: Any, placement: Placement = ANYWHERE,
    shared: tuple[Array, Array] | None = None,
) -> Heads:  # fmt: skip
    """The heads of a layer, from states y [N, L, D]. rope: which of the rotations. shared: another layer's keys and
    values, which it has instead of its own."""
    cos, sin = rotations.cos[rope], rotations.sin[rope]
    rows = y.reshape(-1, y.shape[-1])  # as which the gradients of all projections add up: see `Placement.flat`
    turned = placement.turned or (
        lambda x, weight, cos, sin: rotate(x if weight is None else norm(x, weight, config), cos, sin)
    )

    def rotated(name: str) -> Array:
        x = project_heads(rows.reshape(y.shape), layer, name, placement)
        if (together := layer.get(f"{name}_joint_norm")) is not None:
            x = norm(x.reshape(*x.shape[:2], -1), together.reshape(-1), config).reshape(x.shape)
        return turned(x, layer.get(f"{name}_norm"), cos, sin)

    q = rotated("query")
    if rotations.growth is not None:
        q = q * rotations.growth[rope][..., None, None].astype(q.dtype)
    if shared is not None:
        return Heads(q, *shared)
    v = project_heads(rows.reshape(y.shape), layer, "key" if config.keys_as_values else "value", placement)
    if config.value_norm:
        v = unit_norm(v, config.norm_epsilon)
    return Heads(q, rotated("key"), v)


def gate_of(y: Array, layer: Layer, placement: Placement = ANYWHERE) -> Array:
    """What multiplies the results of attention, [N, L, H, h]."""
    return jax.nn.sigmoid(project_heads(y, layer, "query_gate", placement))


@jax.named_scope("projection")
def project_out(y: Array, layer: Layer, placement: Placement = ANYWHERE) -> Array:
    """What heads give [N, L, H, g] -> [N, L, D]."""
    out = project_summed(y.reshape(*y.shape[:2], -1), layer, "out", placement)
    bias = layer.get("out_bias")
    return out if bias is None else out + bias
