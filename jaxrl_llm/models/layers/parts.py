"""Parts of a layer: rotary position embeddings, norm, projections with their adapters, scores and softmax of attention.

They are written so that XLA compiles their gradients to fast programs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import exact_bits
from jaxrl_llm.models.layers.by_row import with_members
from jaxrl_llm.models.layers.products import product
from jaxrl_llm.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE
from jaxrl_llm.models.quantised import Weight, dense
from jaxrl_llm.models.rope import Rope


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Rotation per position, f32[head_dim / 2] in radians, and the factor on cos and sin.

    Dimensions i and i + head_dim / 2 of a head are a pair. Those that are not rotated are the last pairs, of rate 0:
    files that leave the last dimensions of a head alone are read and written with another order (`io.layout`).
    """
    rates, scale = _rates(rope, head_dim)
    missing = head_dim // 2 - rates.size
    return np.pad(rates, (0, missing)).astype(np.float32), scale


def _rates(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """f64[pairs that are rotated], and the factor on cos and sin."""
    if rope.kind == "none":
        return np.zeros(0), 1.0
    if rope.kind == "proportional":
        pairs = int(rope.fraction * head_dim // 2)
        return rope.theta ** -(np.arange(0, 2 * pairs, 2, dtype=np.float64) / head_dim) / rope.factor, 1.0
    rotated = int(head_dim * rope.fraction)
    base = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind in ("factors", "longrope"):
        return base / np.asarray(rope.factors), rope.attention_factor or 1.0
    if rope.kind == "llama3":
        wavelength = 2 * np.pi / base
        turns = rope.original_length / wavelength
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        return keep * base + (1 - keep) * base / rope.factor, 1.0
    if rope.kind == "yarn":

        def dimension(rotations: float) -> float:
            """The (fractional) dimension that makes this many rotations over the original context."""
            turns = rope.original_length / (rotations * 2 * math.pi)
            return rotated * math.log(turns) / (2 * math.log(rope.theta))

        low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        ramp = np.clip((np.arange(rotated // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        scale = rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0)
        return (1 - ramp) * base + ramp * base / rope.factor, scale
    return base, 1.0


@jax.named_scope("rotation")
def rotation(
    ropes: tuple[Rope, ...], head_dim: int, positions: jax.Array, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """cos and sin for each rope, [R, N, L, head_dim / 2] in `dtype`, from positions int32[N, L]."""
    tables = [frequencies(rope, head_dim) for rope in ropes]
    rate = jnp.asarray(np.stack([rate for rate, _ in tables]))
    scale = jnp.asarray([scale for _, scale in tables], dtype)[:, None, None, None]
    angle = positions.astype(dtype)[None, :, :, None] * rate[:, None, None, :]
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


class Rotations(NamedTuple):
    """What positions do to the heads of one kind of layer, for each of the R rotations that its layers have."""

    cos: jax.Array  # [R, N, L, head size / 2]
    sin: jax.Array
    growth: jax.Array | None  # [R, N, L], factor of queries; None: 1


def ropes_of_kind(config: ModelConfig, kind: int) -> tuple[int, ...]:
    """The numbers of the rotations that the layers of a kind have; of all where layers are of one kind."""
    if not config.kinds:
        return tuple(range(len(config.ropes)))
    return tuple(sorted({config.rope_of_layer[layer] for layer in config.layers_of(kind)}))


def rotations_of(config: ModelConfig, positions: jax.Array, dtype: Any = jnp.float32) -> tuple[Rotations, ...]:
    """The rotations of each kind of layer, from positions int32[N, L]."""
    found = []
    for number, kind in enumerate(config.each_kind):
        ropes = tuple(config.ropes[rope] for rope in ropes_of_kind(config, number))
        growth = None
        if any(rope.query_growth for rope in ropes):
            growth = jnp.stack([
                1 + rope.query_growth * jnp.log1p((positions // max(rope.original_length, 1)).astype(dtype))
                for rope in ropes
            ])  # fmt: skip
        found.append(Rotations(*rotation(ropes, kind.rotated_size, positions, dtype), growth))
    return tuple(found)


@jax.named_scope("rotation")
def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [N, L, heads, head_dim]; dimensions i and i + head_dim / 2 are a pair; in the dtype of cos."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype of sums and products of `dtype`: float32, or float64 of float64."""
    return jnp.promote_types(dtype, jnp.float32)


def linear(x: Array, weight: Weight) -> Array:
    """x [..., K] @ weight [K, N] -> [..., N], as a product of two matrices. The axes of inputs, and of outputs, of the
    weight may be several; it may be rounded (`quantised`).

    With more axes, XLA on CPU writes transposed copies of x and of the output's gradient for the weight's gradient,
    and recomputes what they are made from: a gated MLP's gradient takes 1.4 times as long.
    """
    return product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)


def unit_norm(x: Array, epsilon: float) -> Array:
    """x / rms(x) over the last axis, in float32, back in the dtype of x: `rms_norm` without a weight."""
    wide = x.astype(accumulation_dtype(x.dtype))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: Array, weight: Array, epsilon: float, offset: float = 0.0) -> Array:
    """x / rms(x) * (offset + weight) over the last axis, in float32, back in the dtype of x.

    With n = x / rms(x), w = offset + weight and p = dy n, the gradients are the sum of p over rows, and
    (dy w - n (p . w) / D) / rms(x). Both sums are matrix-vector products: XLA on CPU takes 10 times as long for sums of
    products, and on TPUs it computes those sums twice.
    """
    return _rms_norm(x, weight, epsilon, offset)[0]


def _rms_norm(x: Array, weight: Array, epsilon: float, offset: float) -> tuple[Array, tuple[Array, Array, Array]]:
    x_acc = x.astype(accumulation_dtype(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(x_acc * x_acc, axis=-1, keepdims=True) + epsilon)
    return (x_acc * inverse * (offset + weight.astype(x_acc.dtype))).astype(x.dtype), (x, weight, inverse)


def _rms_norm_backward(
    epsilon: float, offset: float, residuals: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, weight, inverse = residuals
    dy_acc = dy.astype(inverse.dtype)
    w, n = offset + weight.astype(dy_acc.dtype), x.astype(dy_acc.dtype) * inverse
    p, rows = dy_acc * n, tuple(range(x.ndim - 1))
    dot = partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST)
    dweight = dot(jnp.ones(x.shape[:-1], p.dtype), p, ((rows, rows), ((), ())))
    projection = dot(p, w, (((x.ndim - 1,), (0,)), ((), ())))[..., None] / x.shape[-1]
    return ((dy_acc * w - n * projection) * inverse).astype(x.dtype), dweight.astype(weight.dtype)


rms_norm.defvjp(_rms_norm, _rms_norm_backward)


def _products(q: Array, k: Array) -> Array:
    return jnp.einsum("...qh,...sh->...qs", q, k, preferred_element_type=accumulation_dtype(q.dtype))


@jax.custom_vjp
def scores(q: Array, k: Array) -> Array:
    """Products of queries [..., Q, h] with keys [..., S, h], in float32: [..., Q, S]. On CPU see `exact_bits`."""
    # Few queries are those of tokens being decoded, always in the same layout: no copy of all their keys for them.
    on_cpu = partial(exact_bits.scores, _products) if q.shape[-2] >= 16 else _products
    return jax.lax.platform_dependent(q, k, cpu=on_cpu, default=_products)


def _scores_backward(residuals: tuple[Array, Array], ds: Array) -> tuple[Array, Array]:
    return jax.vjp(_products, *residuals)[1](ds)


scores.defvjp(lambda q, k: (scores(q, k), (q, k)), _scores_backward)


@jax.custom_vjp
def softmax(x: Array, sink: Array | None = None) -> Array:
    """Softmax of [..., Q, S] over the last axis. On CPU see `exact_bits`.

    sink: [..., Q or 1], a logit beside those of x, whose share is left out of the result.
    """
    return _softmax(x, sink)[0]


def _softmax(x: Array, sink: Array | None = None) -> tuple[Array, tuple[Array, Array | None]]:
    most = jnp.max(x, axis=-1, keepdims=True)
    if sink is not None:
        most = jnp.maximum(most, sink[..., None])
    e = jnp.exp(x - most)
    total = jax.lax.platform_dependent(e, cpu=exact_bits.sum_in_order, default=partial(jnp.sum, axis=-1, keepdims=True))
    beside = None if sink is None else jnp.exp(sink[..., None] - most)
    if beside is not None:
        total = total + beside
    p = e / total
    return p, (p, None if beside is None else beside / total)


def _softmax_backward(residuals: tuple[Array, Array | None], dp: Array) -> tuple[Array, Array | None]:
    p, of_sink = residuals
    inner = jnp.sum(p * dp, axis=-1, keepdims=True)
    return p * (dp - inner), None if of_sink is None else -jnp.squeeze(of_sink * inner, -1)


softmax.defvjp(_softmax, _softmax_backward)


def project(x: Array, weight: Weight, layer: dict[str, Any], name: str, joined: bool = False) -> Array:
    """`linear`, plus the adapter's output where one layer's dictionary has an adapter for `name`, and what each row's
    own member of a population adds (`by_row`).

    joined: compute both as one product, see `joined_product`, unless the weight is rounded.
    """
    return with_members(_adapted(x, weight, layer, name, joined), x, layer, name)


def _adapted(x: Array, weight: Weight, layer: dict[str, Any], name: str, joined: bool) -> Array:
    if name + LORA_IN not in layer:
        return linear(x, weight)
    into, out = layer[name + LORA_IN].reshape(x.shape[-1], -1), layer[name + LORA_OUT]
    out = out.reshape(into.shape[-1], -1)
    if joined and isinstance(weight, Array):
        into = into * layer[LORA_SCALE] if LORA_SCALE in layer else into
        return joined_product(x, into, weight.reshape(x.shape[-1], -1), out)
    return linear(x, weight) + scaled_low_rank(x @ into, layer) @ out


def scaled_low_rank(x: Array, found: dict[str, Any]) -> Array:
    """What the first matrix of an adapter gives, x [N, L, r], times the factor that is beside it, if one is, in the
    dtype of x. The factor is one number, or one for each row and rank [N, r]: 0 where the row has another adapter."""
    if LORA_SCALE not in found:
        return x
    scale = found[LORA_SCALE].astype(x.dtype)
    return x * (scale[:, None] if scale.ndim else scale)


def with_adapter(layer: dict[str, Any], name: str) -> Array:
    """A projection with its adapter's product added, in the dtype of the weight."""
    weight: Any = layer[name]
    weight = weight if isinstance(weight, Array) else dense(weight)
    if name + LORA_IN not in layer:
        return weight
    into, out = layer[name + LORA_IN], layer[name + LORA_OUT]
    low_rank = into.reshape(-1, into.shape[-1]) @ out.reshape(out.shape[0], -1)
    low_rank = low_rank * layer[LORA_SCALE] if LORA_SCALE in layer else low_rank
    return weight + low_rank.reshape(weight.shape).astype(weight.dtype)


@jax.custom_vjp
def joined_product(x: Array, into: Array, weight: Array, out: Array) -> Array:
    """x [..., K] @ (weight [K, N] + into [K, r] @ out [r, N]), as two products: x @ into, and that beside x.

    By itself the product with `out` takes half as long on TPUs as that with the weight, although it has r / K of its
    operations, because the result goes through memory twice more; and so does that with `into` in the backward pass.
    """
    return _joined(x, x @ into, weight, out)


def _joined(x: Array, low_rank: Array, weight: Array, out: Array) -> Array:
    return linear(jnp.concatenate([x, low_rank], axis=-1), jnp.concatenate([weight, out], axis=0))


def _joined_product_forward(x: Array, into: Array, weight: Array, out: Array) -> tuple[Array, tuple[Array, ...]]:
    low_rank = x @ into
    return _joined(x, low_rank, weight, out), (x, low_rank, into, weight, out)


def _joined_product_backward(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
    x, low_rank, into, weight, out = residuals
    d_low_rank = linear(dy, out.T)
    of_rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    d_into, d_weight = of_rows(x).T @ of_rows(d_low_rank), of_rows(x).T @ of_rows(dy)
    return _joined(dy, d_low_rank, weight.T, into.T), d_into, d_weight, of_rows(low_rank).T @ of_rows(dy)


joined_product.defvjp(_joined_product_forward, _joined_product_backward)
