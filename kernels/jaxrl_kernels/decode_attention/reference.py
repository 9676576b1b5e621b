"""Attention of one token's queries to a cache in plain JAX, with the logits of all columns at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.half_products import put_slice

Array = jax.Array

MASKED = -1e30  # finite, so that rows without visible columns give finite results


class Numbers(NamedTuple):
    """The static numbers of `decode_attention` and `own_attention`."""

    query_scale: float
    softcap: float
    window: int


class PartialAttention(NamedTuple):
    """Unnormalised attention to some of the tokens, which `merge` combines."""

    acc: Array  # f32[N, K, W, R, h], sum of exp(logit - m) value
    m: Array  # f32[N, K, W, R], largest logit
    l: Array  # f32[N, K, W, R], sum of exp(logit - m)


class OwnAttention(NamedTuple):
    """Attention to a prompt and to a row's own tokens, and the ring KV cache with the newest token."""

    result: Array  # [B, K, R, h]
    keys: Array  # [B, K, h, S]
    values: Array  # [B, K, S, h]
    scales: tuple[Array, Array] | None = None  # f32[B, K, S] of keys and of values


def visible_prompt(length: Array, position: Array, S: int, window: int) -> Array:
    """bool[P, W, S]: which columns of prompts of length int32[P] are visible to tokens at position int32[P, W].

    Without a window (0), bool[P, 1, S], because the position does not matter.
    """
    at = jnp.maximum(length - S, 0)[:, None] + jnp.arange(S)  # position of each column
    seen = (at < length[:, None])[:, None]
    return seen & (position[..., None] - at[:, None] < window) if window else seen


def visible_own(count: Array, step: Array, S: int, window: int) -> Array:
    """bool[B, 1, S]: which columns of the ring KV cache are visible to the newest tokens, written at `step`.

    count: int32[B], own tokens of a row before the newest one.
    """
    age = (step - jnp.arange(S)) % S
    seen = age <= count[:, None]
    return (seen & (age < window) if window else seen)[:, None]


def partial_attention(
    q: Array,
    keys: Array,
    values: Array,
    visible: Array,
    key_scale: Array | None,
    value_scale: Array | None,
    query_scale: float,
    softcap: float,
) -> PartialAttention:
    """Attention of q [N, K, W, R, h] to keys [N, K, h, S] and values [N, K, S, h]; scales: f32[N, K, S] or None.

    visible: bool[N, W, S], or [N, 1, S] if it is the same for all rows of a slot. A row without visible columns has
    m = MASKED, and acc and l to which `merge` gives the weight 0.
    """
    N, K, W, R, h = q.shape
    flat = q.reshape(N, K, W * R, h)
    logits = jnp.einsum("nkqh,nkhs->nkqs", flat, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    if key_scale is not None:
        logits = logits * key_scale[:, :, None]
    logits = logits * query_scale
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    seen = jnp.repeat(visible, R, axis=1)[:, None] if visible.shape[1] > 1 else visible[:, None]
    logits = jnp.where(seen, logits, MASKED)
    m = jnp.max(logits, axis=-1)
    # exp(0) for a row without visible columns; `merge` gives it weight 0, as the other m is far above MASKED.
    weights = jnp.exp(logits - m[..., None])
    l = jnp.sum(weights, axis=-1)
    if value_scale is not None:
        weights = weights * value_scale[:, :, None]
    weights, values = weights.astype(q.dtype), values.astype(q.dtype)
    acc = jnp.einsum("nkqs,nksh->nkqh", weights, values, preferred_element_type=jnp.float32)
    return PartialAttention(acc.reshape(N, K, W, R, h), m.reshape(N, K, W, R), l.reshape(N, K, W, R))


def merge(a: PartialAttention, b: PartialAttention) -> Array:
    """The result of attention to the tokens of both, f32[N, K, W, R, h]."""
    m = jnp.maximum(a.m, b.m)
    scale_a, scale_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    l = a.l * scale_a + b.l * scale_b
    return (a.acc * scale_a[..., None] + b.acc * scale_b[..., None]) / jnp.maximum(l, 1e-30)[..., None]


def reference_prompts(
    q: Array, keys: Array, values: Array, length: Array, position: Array, key_scale: Array | None,
    value_scale: Array | None, *, numbers: Numbers,
) -> PartialAttention:  # fmt: skip
    """`decode_attention`."""
    visible = visible_prompt(length, position, keys.shape[3], numbers.window)
    return partial_attention(q, keys, values, visible, key_scale, value_scale, numbers.query_scale, numbers.softcap)


def write_scales(scales: tuple[Array, Array], new: tuple[Array, Array], place: Array) -> tuple[Array, Array]:
    """Scales f32[B, K, S] of a ring KV cache, with the new ones f32[B, K] in column `place`."""

    def written(old: Array, x: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, x[..., None], place, 2)

    return written(scales[0], new[0]), written(scales[1], new[1])


def reference_own(
    q: Array, k: Array, v: Array, keys: Array, values: Array, count: Array, step: Array, prompt: PartialAttention,
    new_scales: tuple[Array, Array] | None, scales: tuple[Array, Array] | None, *, numbers: Numbers,
) -> OwnAttention:  # fmt: skip
    """`own_attention`; scales are those of keys and of values."""
    S = keys.shape[3]
    place = step % S
    keys = put_slice(keys, k[..., None], place, 3)
    values = put_slice(values, v[:, :, None], place, 2)
    if scales is not None and new_scales is not None:
        scales = write_scales(scales, new_scales, place)
    visible = visible_own(count, step, S, numbers.window)
    key_scale, value_scale = scales or (None, None)
    mine = partial_attention(
        q[:, :, None], keys, values, visible, key_scale, value_scale, numbers.query_scale, numbers.softcap
    )
    y = merge(PartialAttention(*(x[:, :, None] for x in prompt)), mine)[:, :, 0]
    return OwnAttention(y.astype(q.dtype), keys, values, scales)
