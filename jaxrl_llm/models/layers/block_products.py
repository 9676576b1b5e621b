"""Products whose two factors are rounded to eight bits, in the forward and in the backward pass (Jet-RL, 2601.14243).

R(A) rounds the numbers of a matrix in groups of `size` along the axis that the product sums over, R2(W) rounds a weight
in blocks of size x size; each group and block has a scale of its own (`quantised.to_scale`). The three products are

    Y = R(X) R2(W)        dX = R(dY) R2(W)^T        dW = R(X)^T R(dY)

where the groups of the last lie along rows of the batch. Gradients go through the rounding as if it was not there. Each
product rounds X and dY from their own dtype: a kernel that keeps only the R(X) of the forward pass would round it again
for dW.

Products of values are summed over a group in float32, and the sums times both scales over groups. The values enter as
bfloat16, which has all numbers of both kinds: the figures are those of processors that multiply eight bits, the speed
is not. Sums of int8 in a group of up to 1024 are exact, whatever their order.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.quantised import BlockRounding, as_stored, inverse, to_scale, to_values, values_of_blocks


class Rounded(NamedTuple):
    """A matrix [R, K], its K numbers in G groups, of which the last is filled with 0."""

    values: Array  # [G, R, size]
    scale: Array  # f32[G, R]


def in_groups(a: Array, how: BlockRounding) -> Rounded:
    """Round a matrix [R, K] in groups along its second axis."""
    grouped = _grouped(as_stored(a), how.size)
    scale = to_scale(jnp.max(jnp.abs(grouped), axis=2), how.kind)
    return Rounded(to_values(grouped * inverse(scale)[..., None], how.kind), scale)


def quantised_product(x: Array, values: Array, scale: Array, how: BlockRounding) -> Array:
    """R(x) [M, K] times values [K, N] with scales of blocks: [M, N] in the dtype of x. Without gradients."""
    return _summed(in_groups(x, how), _of_blocks(values.T, scale.T, how)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def straight_through_product(x: Array, w: Array, scale: Array, how: BlockRounding) -> Array:
    """R(x) [M, K] times R2(w) [K, N], whose scales are given: [M, N] in the dtype of x, with the module's gradients."""
    return quantised_product(x, values_of_blocks(w, scale, how), scale, how)


def _backward(how: BlockRounding, residuals: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, w, scale = residuals
    dx = _summed(in_groups(dy, how), _of_blocks(values_of_blocks(w, scale, how), scale, how))
    dw = _summed(in_groups(x.T, how), in_groups(dy.T, how))
    return dx.astype(x.dtype), dw.astype(w.dtype), None


straight_through_product.defvjp(
    lambda x, w, scale, how: (straight_through_product(x, w, scale, how), (x, w, scale)), _backward
)


def _of_blocks(values: Array, scale: Array, how: BlockRounding) -> Rounded:
    """Values [R, K] with scales of blocks [R / size, K / size], as groups along the second axis."""
    return Rounded(_grouped(values, how.size), jnp.repeat(scale.T, how.size, axis=1)[:, : len(values)])


def _grouped(a: Array, size: int) -> Array:
    """A matrix [R, K] as [G, R, size]."""
    whole = jnp.pad(a, [(0, 0), (0, -a.shape[1] % size)])
    return whole.reshape(len(a), -1, size).swapaxes(0, 1)


def _summed(a: Rounded, b: Rounded) -> Array:
    """The matrices a [M, K] times b [N, K] transposed, f32[M, N], a group at a time."""

    def of_group(number: Array | int) -> Array:
        one, other = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), (a, b))
        # Without the barrier XLA for CPUs makes wide copies of all groups before the loop.
        left, right = (x.astype(jnp.bfloat16) for x in jax.lax.optimization_barrier((one.values, other.values)))
        sums = jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return sums * one.scale[:, None] * other.scale

    return jax.lax.fori_loop(1, len(a.values), lambda number, y: y + of_group(number), of_group(0))
