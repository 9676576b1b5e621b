"""Parts of a layer, written so that XLA makes good programs of their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype of what is not rounded to `dtype`: float32, or float64 where that is float64."""
    return jnp.promote_types(dtype, jnp.float32)


def linear(x: Array, weight: Array) -> Array:
    """x [..., K] @ weight [K, N] -> [..., N], as a product of two matrices.

    Given more axes, XLA on CPU writes transposed copies of x and of the output's gradient for the weight's gradient,
    and works out again for them what they come from: a gated MLP's gradient takes 1.4 times as long.
    """
    return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], weight.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: Array, weight: Array, epsilon: float, offset: float = 0.0) -> Array:
    """x / rms(x) * (offset + weight) over the last axis, in float32, back in the dtype of x.

    With n = x / rms(x), w = offset + weight and p = dy n, the gradients are the sum of p over rows, and
    (dy w - n (p . w) / D) / rms(x). Both sums are products with a vector: XLA on CPU takes 10 times as long for sums of
    products, and on TPUs it makes these sums again.
    """
    return _rms_norm(x, weight, epsilon, offset)[0]


def _rms_norm(x: Array, weight: Array, epsilon: float, offset: float) -> tuple[Array, tuple[Array, Array, Array]]:
    long = x.astype(accumulation_dtype(x.dtype))
    inverse = jax.lax.rsqrt(jnp.mean(long * long, axis=-1, keepdims=True) + epsilon)
    return (long * inverse * (offset + weight.astype(long.dtype))).astype(x.dtype), (x, weight, inverse)


def _rms_norm_backward(
    epsilon: float, offset: float, kept: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, weight, inverse = kept
    long = dy.astype(inverse.dtype)
    w, n = offset + weight.astype(long.dtype), x.astype(long.dtype) * inverse
    p, rows = long * n, tuple(range(x.ndim - 1))
    exactly = partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST)
    by_weight = exactly(jnp.ones(x.shape[:-1], p.dtype), p, ((rows, rows), ((), ())))
    along = exactly(p, w, (((x.ndim - 1,), (0,)), ((), ())))[..., None] / x.shape[-1]
    return ((long * w - n * along) * inverse).astype(x.dtype), by_weight.astype(weight.dtype)


rms_norm.defvjp(_rms_norm, _rms_norm_backward)


def _products(q: Array, k: Array) -> Array:
    return jnp.einsum("...qh,...sh->...qs", q, k, preferred_element_type=accumulation_dtype(q.dtype))


@jax.custom_vjp
def scores(q: Array, k: Array) -> Array:
    """Products of queries [..., Q, h] with keys [..., S, h], in float32: [..., Q, S].

    XLA on CPU adds the h terms of a score in an order that depends on how often 2 divides the number of vectors (of
    16) that the keys fill; there keys are padded to an odd number of them, so that a score has the same bits beside
    however many keys. With `softmax`, and heads of a multiple of 64 places, this gives a token the same state in any
    layout of a batch. Otherwise what is rounded differently in one layer grows in those after it, to 1e-5 of SmolLM2's
    gradients.
    """
    # Few queries are those of tokens being decoded, which always lie alike: no copy of all their keys for them.
    steady = _odd_products if q.shape[-2] >= 16 else _products
    return jax.lax.platform_dependent(q, k, cpu=steady, default=_products)


def _odd_products(q: Array, k: Array) -> Array:
    S = k.shape[-2]
    return _products(q, jnp.pad(k, [(0, 0)] * (k.ndim - 2) + [(0, (16 - S) % 32), (0, 0)]))[..., :S]


def _scores_backward(kept: tuple[Array, Array], ds: Array) -> tuple[Array, Array]:
    return jax.vjp(_products, *kept)[1](ds)


scores.defvjp(lambda q, k: (scores(q, k), (q, k)), _scores_backward)


@jax.custom_vjp
def softmax(x: Array) -> Array:
    """Softmax of [..., Q, S] over the last axis; on CPU, places whose weight is 0 do not change the others' bits.

    There the sums are a product with 64 columns of ones, whose terms XLA adds one after another (up to some 400 of
    them), so that zeros in between change nothing. A sum over the axis would add them in turns, by their places.
    """
    return _softmax(x)[0]


def _softmax(x: Array) -> tuple[Array, Array]:
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    total = jax.lax.platform_dependent(e, cpu=_sum_in_order, default=partial(jnp.sum, axis=-1, keepdims=True))
    p = e / total
    return p, p


def _sum_in_order(e: Array) -> Array:
    return (e @ jnp.ones((e.shape[-1], 64), e.dtype))[..., :1]


def _softmax_backward(p: Array, dp: Array) -> tuple[Array]:
    return (p * (dp - jnp.sum(p * dp, axis=-1, keepdims=True)),)


softmax.defvjp(_softmax, _softmax_backward)
