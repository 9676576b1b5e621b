"""Products whose factors are both rounded to eight bits, in the forward and the backward pass (Jet-RL, 2601.14243).

R(A) rounds the numbers of a matrix in groups along the axis that the product sums over, R2(W) a weight in blocks
(`quantised.blocks`). The three products of a projection are

    Y = R(X) R2(W)        dX = R(dY) R2(W)^T        dW = R(X)^T R(dY)

where the groups of the last lie along the rows. Gradients pass the rounding as if it was not there. Each product rounds
X and dY themselves: a kernel that keeps only the R(X) of the forward pass would round that again for dW.

Values are summed within a group in float32, and the sums, times both scales, over groups. The values enter as float32;
they have at most 8 bits, so that products of any precision are exact. The numbers are those of processors that multiply
eight bits, the speed is not.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.quantised.blocks import BlockRounding, QuantisedBlocks, in_blocks, quantise_blocks

Rounded = tuple[Array, Array]  # values and scales of a matrix


def quantised_product(x: Array, w: QuantisedBlocks) -> Array:
    """R(x) [M, K] times a rounded matrix [K, N]: [M, N] in the dtype of x. Without gradients."""
    return _product(_in_groups(x, w.how), (w.values, _of_outputs(w.scale, w)), w.how.size).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def straight_through_product(x: Array, w: Array, how: BlockRounding) -> Array:
    """R(x) [M, K] times R2(w) [K, N]: [M, N] in the dtype of x, with the gradients of the module's docstring."""
    return quantised_product(x, quantise_blocks(w, how))


def _backward(how: BlockRounding, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    rounded = quantise_blocks(w.T, how)
    dx = quantised_product(dy, rounded)
    by_rows, scale = in_blocks(dy, (how.size, 1), how.kind)
    dw = _product(_in_groups(x.T, how), (by_rows, scale), how.size)
    return dx.astype(x.dtype), dw.astype(w.dtype)


straight_through_product.defvjp(lambda x, w, how: (straight_through_product(x, w, how), (x, w)), _backward)


def _in_groups(a: Array, how: BlockRounding) -> Rounded:
    """A matrix [M, K], rounded in groups along its rows: values, and scales [M, groups]."""
    return in_blocks(a, (1, how.size), how.kind)


def _of_outputs(scale: Array, w: QuantisedBlocks) -> Array:
    """Of the scales of blocks those of each output, [groups, N]."""
    return jnp.repeat(scale, w.how.size, axis=1)[:, : w.shape[1]]


def _product(x: Rounded, w: Rounded, size: int) -> Array:
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
