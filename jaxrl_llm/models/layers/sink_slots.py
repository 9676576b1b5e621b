"""Sink slots: keys and values of a layer that belong to no token, and that every token sees (ReLIC, 2410.02751).

n of them in each key-value head, learned, and without position. Where all are 0, a head's result is that of a softmax
with n more ones in its denominator.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.decode_attention import PartialAttention, partial_attention

Array = jax.Array


class Slots(NamedTuple):
    """The slots of a layer."""

    keys: Array  # [K, n, h]
    values: Array  # [K, n, h]


def slots_of(layer: dict[str, Any], heads: int) -> Slots | None:
    """The slots of a layer, None where it has none. heads: so many key-value heads, copies of each in turn."""
    if "sink_keys" not in layer:
        return None
    return Slots(*(jnp.repeat(x, heads // x.shape[0], axis=0) for x in (layer["sink_keys"], layer["sink_values"])))


def prepend_slots(k: Array, v: Array, visible: Array, slots: Slots) -> tuple[Array, Array, Array]:
    """Keys k and values v [N, K, S, h] after those of the slots, and visible bool[N, L, n + S] of bool[N, L, S]."""

    def after(slot: Array, x: Array) -> Array:
        return jnp.concatenate([jnp.broadcast_to(slot.astype(x.dtype), (len(x), *slot.shape)), x], axis=2)

    seen = jnp.pad(visible, ((0, 0), (0, 0), (slots.keys.shape[1], 0)), constant_values=True)
    return after(slots.keys, k), after(slots.values, v), seen


def merge_slots(part: PartialAttention, q: Array, slots: Slots, scale: float, softcap: float) -> PartialAttention:
    """Attention that also goes to the slots. q [N, K, W, R, h], with which `part` was made."""
    N = q.shape[0]
    k = jnp.broadcast_to(slots.keys.swapaxes(1, 2), (N, *slots.keys.swapaxes(1, 2).shape))
    v = jnp.broadcast_to(slots.values, (N, *slots.values.shape))
    other = partial_attention(q, k, v, jnp.ones((N, 1, v.shape[2]), bool), None, None, scale, softcap)
    most = jnp.maximum(part.m, other.m)
    a, b = jnp.exp(part.m - most), jnp.exp(other.m - most)
    return PartialAttention(part.acc * a[..., None] + other.acc * b[..., None], most, part.l * a + other.l * b)
