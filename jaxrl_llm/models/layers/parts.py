"""Parts of a layer: rotary position embeddings, norm, scores and softmax of attention.

They are written so that XLA compiles their gradients to fast programs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.rope import Rope, frequencies
from jaxrl_llm.models.layers import exact_bits


@jax.named_scope("rotation")
def rotation(
    ropes: tuple[Rope, ...], head_dim: int, positions: jax.Array, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """cos and sin for each rope, [R, N, L, head_dim / 2] in `dtype`, from positions int32[N, L]."""
    tables = [frequencies(rope, head_dim) for rope in ropes]
    rate = jnp.asarray(np.stack([rate for rate, _ in tables]))[:, None, None, :]
    scale = jnp.asarray(np.stack([scale for _, scale in tables]), dtype)[:, None, None, :]
    angle = positions.astype(dtype)[None, :, :, None] * rate
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


def rounded_once(elementwise: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of arrays of one shape and dtype, element by element, which rounds its results only.

    Of bfloat16 it is computed in float32, and so are its gradients, for which the arguments alone are kept. XLA for
    CPUs would convert and round the result of each operation.
    """

    def wide(*arrays: jax.Array) -> jax.Array:
        return elementwise(*(x.astype(jnp.float32) for x in arrays)).astype(arrays[0].dtype)

    @jax.custom_vjp
    def once(*arrays: jax.Array) -> jax.Array:
        return wide(*arrays)

    once.defvjp(lambda *arrays: (wide(*arrays), arrays), lambda arrays, dy: jax.vjp(wide, *arrays)[1](dy))
    return lambda *arrays: (once if arrays[0].dtype == jnp.bfloat16 else elementwise)(*arrays)


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype of sums and products of `dtype`: float32, or float64 of float64."""
    return jnp.promote_types(dtype, jnp.float32)


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
    on_cpu = partial(exact_bits.exact_scores, _products) if q.shape[-2] >= 16 else _products
    return jax.lax.platform_dependent(q, k, cpu=on_cpu, default=_products)


scores.defvjp(lambda q, k: (scores(q, k), (q, k)), lambda saved, ds: jax.vjp(_products, *saved)[1](ds))


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
