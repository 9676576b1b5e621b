"""Projections of a layer: products with weights, and with their low-rank adapters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.layers.by_row import with_members
from jaxrl_llm.models.layers.products import product
from jaxrl_llm.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE
from jaxrl_llm.models.quantised import Weight, dense


def linear(x: Array, weight: Weight) -> Array:
    """x [..., K] @ weight [K, N] -> [..., N], as a product of two matrices. The axes of inputs, and of outputs, of the
    weight may be several; it may be rounded (`quantised`).

    With more axes, XLA on CPU writes transposed copies of x and of the output's gradient for the weight's gradient,
    and recomputes what they are made from: a gated MLP's gradient takes 1.4 times as long.
    """
    return product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)


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
    return linear(x, weight) + linear(scaled_low_rank(linear(x, into), layer), out)


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
    return _joined(x, linear(x, into), weight, out)


def _joined(x: Array, low_rank: Array, weight: Array, out: Array) -> Array:
    return linear(jnp.concatenate([x, low_rank], axis=-1), jnp.concatenate([weight, out], axis=0))


def _joined_product_forward(x: Array, into: Array, weight: Array, out: Array) -> tuple[Array, tuple[Array, ...]]:
    low_rank = linear(x, into)
    return _joined(x, low_rank, weight, out), (x, low_rank, into, weight, out)


def _joined_product_backward(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
    x, low_rank, into, weight, out = residuals
    d_low_rank = linear(dy, out.T)
    of_rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    d_into, d_weight = of_rows(x).T @ of_rows(d_low_rank), of_rows(x).T @ of_rows(dy)
    return _joined(dy, d_low_rank, weight.T, into.T), d_into, d_weight, of_rows(low_rank).T @ of_rows(dy)


joined_product.defvjp(_joined_product_forward, _joined_product_backward)
