"""Products with weights, rounded or not; all products of a decoder's layers go through them.

Products whose factors are both rounded to eight bits (Jet-RL, 2601.14243) are so in the backward pass too: R(A) rounds
the numbers of a matrix in groups along the axis that the product sums over, R2(W) a weight in blocks
(`models.quantised`), and the three products of a projection are

    Y = R(X) R2(W)        dX = R(dY) R2(W)^T        dW = R(X)^T R(dY)

where the groups of the last lie along the rows. Gradients pass the rounding as if it was not there. Each product rounds
X and dY themselves: a kernel that keeps only the R(X) of the forward pass would round that again for dW. Values are
summed within a group in float32, and the sums, times both scales, over groups. The values enter as float32; they have
at most 8 bits, so that products of any precision are exact. The numbers are those of processors that multiply eight
bits, the speed is not.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxrl_kernels.half_products import matmul, over_rows
from jaxrl_kernels.partition import vary_together

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models import quantised
from jaxrl_llm.models.layers.ragged import Groups, of_matrices, ragged_dot
from jaxrl_llm.models.quantised import Quantised, QuantisedBlocks, StraightThrough, in_blocks, quantise_blocks, rounded
from jaxrl_llm.models.quantised.normal_float import NormalFloat, as_floats

FEW_ROWS = 128  # rows of a product that XLA for CPUs would spend on converting the weights, mostly
BLOCK = 2**17  # weights that are converted at a time on CPUs: they stay in a core's cache


def matrix_product(x: Array, weight: quantised.Weight) -> Array:
    """x [M, K] times a matrix of K inputs, whose axes may be several: [M, N], in the dtype of x if it is rounded."""
    K = x.shape[1]
    if isinstance(weight, Quantised):
        weight = Quantised(weight.values.reshape(K, -1), weight.scale.reshape(1, -1))
        return _frozen_product(*vary_together(x, weight), None)
    if isinstance(weight, NormalFloat):
        levels = weight.levels.reshape(K // 2, -1)
        weight = NormalFloat(levels, weight.scale.reshape(-1, levels.shape[1]))
        return _frozen_product(*vary_together(x, weight), None)
    if isinstance(weight, QuantisedBlocks):
        return quantised_product(*vary_together(x, dataclasses.replace(weight, values=weight.values.reshape(K, -1))))
    if isinstance(weight, quantised.StraightThroughBlocks):
        return straight_through_product(*vary_together(x, weight.weight.reshape(K, -1)), weight.how)
    if isinstance(weight, StraightThrough):
        w, scale = weight.weight.reshape(K, -1), weight.scale.reshape(1, -1)
        return _straight_through(*vary_together(x, w, scale), None, weight.kind)
    return matmul(x, weight.reshape(K, -1))


def ragged_product(x: Array, weight: Array | Quantised | NormalFloat | StraightThrough, groups: Groups) -> Array:
    """Rows x [M, K] times the matrices of their experts [E, K, N]: [M, N]. Rows of no expert are not defined."""
    if isinstance(weight, Quantised | NormalFloat):
        return _frozen_product(*vary_together(x, weight, groups))
    if isinstance(weight, StraightThrough):
        return _straight_through(*vary_together(x, weight.weight, weight.scale, groups), weight.kind)
    return ragged_dot(x, weight.astype(x.dtype), groups)


@jax.custom_vjp
def _frozen_product(x: Array, q: Quantised | NormalFloat, groups: Groups | None) -> Array:
    """The product of x [M, K] with a matrix of [K, N], or of rows with those of their experts [E, K, N], that has no
    gradient. The backward pass makes the matrix again."""
    return _product(x, q, groups)


def _frozen_product_backward(
    residuals: tuple[Quantised | NormalFloat, Groups | None], dy: Array
) -> tuple[Array, None, None]:
    q, groups = residuals
    if isinstance(q, NormalFloat):
        return _into_inputs(dy, as_floats(q, dy.dtype), groups), None, None
    of_rows = q.scale if groups is None else _scale_of_rows(q.scale, groups)
    return _into_inputs((dy * of_rows).astype(dy.dtype), q.values.astype(dy.dtype), groups), None, None


_frozen_product.defvjp(lambda x, q, groups: (_frozen_product(x, q, groups), (q, groups)), _frozen_product_backward)


def _into_inputs(dy: Array, w: Array, groups: Groups | None) -> Array:
    """The gradient [M, K] of inputs, of that of outputs dy [M, N] of a product with w; see `_frozen_product`."""
    sums = jnp.promote_types(dy.dtype, jnp.float32)
    if groups is None:
        return jnp.einsum("mn,kn->mk", dy, w, preferred_element_type=sums).astype(dy.dtype)
    return jax.lax.ragged_dot(dy, w.swapaxes(-1, -2), groups.sizes, preferred_element_type=sums).astype(dy.dtype)


def _product(x: Array, q: Quantised | NormalFloat, groups: Groups | None) -> Array:
    """x times the values, summed in float32, and then times the scale."""
    sums = jnp.promote_types(x.dtype, jnp.float32)
    if isinstance(q, NormalFloat):
        w = as_floats(q, x.dtype)
        y = jnp.matmul(x, w, preferred_element_type=sums) if groups is None else jax.lax.ragged_dot(
            x, w, groups.sizes, preferred_element_type=sums
        )  # fmt: skip
        return y.astype(x.dtype)
    if groups is not None:
        y = jax.lax.ragged_dot(x, q.values.astype(x.dtype), groups.sizes, preferred_element_type=sums)
        return (y * _scale_of_rows(q.scale, groups)).astype(x.dtype)

    def whole(x: Array, values: Array) -> Array:
        return jnp.matmul(x, values.astype(x.dtype), preferred_element_type=sums)

    by_blocks = len(x) <= FEW_ROWS and q.values.size > BLOCK and sums == jnp.float32
    y = jax.lax.platform_dependent(x, q.values, cpu=_blocked if by_blocks else whole, default=whole)
    return (y * q.scale).astype(x.dtype)


def _scale_of_rows(scale: Array, groups: Groups) -> Array:
    """Of scales [E, 1, N] those of each row's expert, [M, N]."""
    return scale[jnp.minimum(groups.of_row, len(scale) - 1), 0]


def _blocked(x: Array, values: Array) -> Array:
    """x [M, K] times values [K, N], f32[M, N], for CPUs: XLA first writes a wide copy of a product's narrow operand.

    So that the copy stays in a core's cache, it is made of some columns at a time. The last block overlaps.
    """
    K, N = values.shape
    if values.dtype == jnp.float8_e4m3fn:
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)  # or XLA converts them all to float16
    width = min(max(BLOCK // K // 64, 1) * 64, N)

    def step(number: Array, out: Array) -> Array:
        first = jnp.minimum(number * width, N - width)
        # Without the barrier XLA converts all blocks at once, before the loop.
        block = jax.lax.optimization_barrier(jax.lax.dynamic_slice_in_dim(values, first, width, axis=1))
        y = jnp.matmul(x, _widened(block, x.dtype), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, y, first, axis=1)

    return jax.lax.fori_loop(0, math.ceil(N / width), step, jnp.zeros((len(x), N), jnp.float32))


def _widened(values: Array, dtype: Any) -> Array:
    """Values of int8, or the bits uint8 of float8, in a dtype."""
    if values.dtype != jnp.uint8:
        return values.astype(dtype)
    bits = values.astype(jnp.uint32)
    size, sign = bits & 0x7F, (bits & 0x80) << 24
    normal = jax.lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)  # exponents count from -127, not -7
    found = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    found = jax.lax.bitcast_convert_type(found, jnp.uint32) | sign
    return jax.lax.bitcast_convert_type(found, jnp.float32).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _straight_through(x: Array, w: Array, scale: Array, groups: Groups | None, kind: str) -> Array:
    """The product of x [M, K] with w [K, N], or of rows with those of their experts [E, K, N], rounded.

    The gradient of x is that of the product with the rounded matrix, the gradient of w as if it was not rounded.
    Nothing that is rounded is kept for the backward pass.
    """
    return _product(x, rounded(w, scale, kind), groups)


def _straight_through_backward(
    kind: str, residuals: tuple[Array, Array, Array, Groups | None], dy: Array
) -> tuple[Array, Array, None, None]:
    x, w, scale, groups = residuals
    values = rounded(w, scale, kind).values.astype(x.dtype)
    of_rows = scale if groups is None else _scale_of_rows(scale, groups)
    dx = _into_inputs((dy * of_rows).astype(x.dtype), values, groups)
    return dx, (over_rows(x, dy) if groups is None else of_matrices(x, dy, groups)).astype(w.dtype), None, None


_straight_through.defvjp(
    lambda x, w, scale, groups, kind: (_straight_through(x, w, scale, groups, kind), (x, w, scale, groups)),
    _straight_through_backward,
)


Rounded = tuple[Array, Array]  # values and scales of a matrix


def quantised_product(x: Array, w: QuantisedBlocks) -> Array:
    """R(x) [M, K] times a rounded matrix [K, N]: [M, N] in the dtype of x. Without gradients."""
    scale = jnp.repeat(w.scale, w.how.size, axis=1)[:, : w.shape[1]]  # of each output, [groups, N]
    return _product_of_groups(_in_groups(x, w.how), (w.values, scale), w.how.size).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def straight_through_product(x: Array, w: Array, how: quantised.BlockRounding) -> Array:
    """R(x) [M, K] times R2(w) [K, N]: [M, N] in the dtype of x, with the gradients of the module's docstring."""
    return quantised_product(x, quantise_blocks(w, how))


def _rounded_backward(how: quantised.BlockRounding, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    dx = quantised_product(dy, quantise_blocks(w.T, how))
    by_rows, scale = in_blocks(dy, (how.size, 1), how.kind)
    dw = _product_of_groups(_in_groups(x.T, how), (by_rows, scale), how.size)
    return dx.astype(x.dtype), dw.astype(w.dtype)


straight_through_product.defvjp(lambda x, w, how: (straight_through_product(x, w, how), (x, w)), _rounded_backward)


def _in_groups(a: Array, how: quantised.BlockRounding) -> Rounded:
    """A matrix [M, K], rounded in groups along its rows: values, and scales [M, groups]."""
    return in_blocks(a, (1, how.size), how.kind)


def _product_of_groups(x: Rounded, w: Rounded, size: int) -> Array:
    """Values [M, K] with scales [M, groups], times values [K, N] with scales [groups, N]: f32[M, N], by groups."""
    (x_values, x_scale), (w_values, w_scale) = x, w
    (M, K), N = x_values.shape, w_values.shape[1]
    groups = (
        jnp.pad(x_values, [(0, 0), (0, -K % size)]).reshape(M, -1, size).swapaxes(0, 1), x_scale.T[:, :, None],
        jnp.pad(w_values, [(0, -K % size), (0, 0)]).reshape(-1, size, N), w_scale,
    )  # fmt: skip

    def add(total: Array, group: tuple[Array, ...]) -> tuple[Array, None]:
        x, x_scale, w, w_scale = group
        return total + (x.astype(jnp.float32) @ w.astype(jnp.float32)) * x_scale * w_scale, None

    # Zeros that vary over a mesh as the factors do.
    return jax.lax.scan(add, 0 * x_scale[:, :1] * w_scale[:1], groups)[0]
