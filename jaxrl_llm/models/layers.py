"""Parts of a layer, written so that XLA compiles their gradients to fast programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import exact_bits

Array = jax.Array


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype of sums and products of `dtype`: float32, or float64 of float64."""
    return jnp.promote_types(dtype, jnp.float32)


def linear(x: Array, weight: Array) -> Array:
    """x [..., K] @ weight [K, N] -> [..., N], as a product of two matrices.

    With more axes, XLA on CPU writes transposed copies of x and of the output's gradient for the weight's gradient,
    and recomputes what they are made from: a gated MLP's gradient takes 1.4 times as long.
    """
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], weight.shape[-1])


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
def softmax(x: Array) -> Array:
    """Softmax of [..., Q, S] over the last axis. On CPU see `exact_bits`."""
    return _softmax(x)[0]


def _softmax(x: Array) -> tuple[Array, Array]:
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    total = jax.lax.platform_dependent(e, cpu=exact_bits.sum_in_order, default=partial(jnp.sum, axis=-1, keepdims=True))
    p = e / total
    return p, p


def _softmax_backward(p: Array, dp: Array) -> tuple[Array]:
    return (p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True)),)


softmax.defvjp(_softmax, _softmax_backward)
