"""Products of matrices of which one is bfloat16: on CPUs both factors are bfloat16, and the sums float32.

XLA for CPUs (jaxlib 0.10) calls kernels in the processor's own instructions for bfloat16 where the result is float32
and the first matrix is not contracted over its rows; else it widens both to float32, which takes 2 to 5 times as long.
GPUs and TPUs sum in float32 whatever the result, so there these functions are plain products. `put_slice`
writes slices into arrays of 8 or 16 bits an element.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxrl_kernels.partition import vary_together

Array = jax.Array
ROW_MAJOR = Layout((0, 1))


def is_half(*arrays: Array) -> bool:
    """Whether the last array is bfloat16 and the others are that or float32."""
    return arrays[-1].dtype == jnp.bfloat16 and all(x.dtype in (jnp.bfloat16, jnp.float32) for x in arrays)


def matmul(x: Array, w: Array) -> Array:
    """x [M, K] @ w [K, N] in the dtype of x. w of bfloat16 and x of that or float32; or other dtypes, as by `@`.

    On CPUs a float32 x enters as the sum of two bfloat16 matrices, with 16 of its 24 bits, and gradients are products
    of bfloat16 factors. Elsewhere they are those of `@`.
    """
    return _matmul(*vary_together(x, w)) if is_half(x, w) else x @ w


def by_rows(x: Array, w: Array) -> Array:
    """`products`, without gradients of its own. A float32 x enters CPUs as in `matmul`."""
    if not is_half(x, w):
        return products(x, w)
    return jax.lax.platform_dependent(*vary_together(x, w), cpu=partial(_in_halves, axes=(1, 1)), default=products)


def products(x: Array, w: Array) -> Array:
    """x [M, K] @ w.T, w [N, K]: f32[M, N], accumulated in float32 (or float64 of float64)."""
    dtype = jnp.result_type(x, w)
    return _contracted(x.astype(dtype), w.astype(dtype), (1, 1))


def over_rows(x: Array, y: Array) -> Array:
    """x.T @ y of x [M, K] and y [M, N]: f32[K, N], or of float64, without gradients of its own."""
    plain = partial(_contracted, axes=(0, 0))
    if not x.dtype == y.dtype == jnp.bfloat16:
        return plain(x, y)
    return jax.lax.platform_dependent(*vary_together(x, y), cpu=_over_rows, default=plain)


def _over_rows(x: Array, y: Array) -> Array:
    # The constraint makes a transposed copy, which takes a tenth of the time that the slower product would lose. The
    # barrier keeps what x is made of out of the copy, which would make it again in the order of columns.
    x = jax.lax.optimization_barrier(x)
    return _contracted(with_layout_constraint(x.T, ROW_MAJOR), y, (1, 0))


def _contracted(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """The product of two matrices over an axis of each, summed in float32, or float64 of float64."""
    sums = jnp.result_type(jnp.float32, a, b)
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=sums)


def _in_halves(x: Array, w: Array, axes: tuple[int, int]) -> Array:
    """`_contracted` of x [M, K] with w of bfloat16, where a float32 x is the sum of two matrices of bfloat16."""
    if x.dtype == w.dtype:
        return _contracted(x, w, axes)
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA drops a cast that is cast back
    halves = high.astype(w.dtype), (x - high).astype(w.dtype)
    if len(x) > w.shape[1 - axes[1]]:  # one beside the other: the sum of both is that of one product
        return _contracted(jnp.concatenate(halves, axis=1), jnp.concatenate([w, w], axis=axes[1]), axes)
    both = _contracted(jnp.concatenate(halves), w, axes)  # one below the other: w is read once
    return both[: len(x)] + both[len(x) :]


@jax.custom_vjp
def _matmul(x: Array, w: Array) -> Array:
    def on_cpu(x: Array, w: Array) -> Array:
        return _in_halves(x, w, (1, 0)).astype(x.dtype)

    return jax.lax.platform_dependent(x, w, cpu=on_cpu, default=jnp.matmul)


def _matmul_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    def on_cpu(x: Array, w: Array, dy: Array) -> tuple[Array, Array]:
        half = dy.astype(w.dtype)
        return _contracted(half, w, (1, 1)).astype(x.dtype), _over_rows(x.astype(w.dtype), half).astype(w.dtype)

    def elsewhere(x: Array, w: Array, dy: Array) -> tuple[Array, Array]:
        return jax.vjp(jnp.matmul, x, w)[1](dy)

    return jax.lax.platform_dependent(*residuals, dy, cpu=on_cpu, default=elsewhere)


_matmul.defvjp(lambda x, w: (_matmul(x, w), (x, w)), _matmul_backward)


BITS = {1: jnp.uint8, 2: jnp.uint16}


def put_slice(old: Array, new: Array, start: Any, axis: int) -> Array:
    """`old` with `new`, of its dtype, from `start` on along an axis; as `dynamic_update_slice_in_dim`.

    XLA for CPUs (jaxlib 0.10) has no operations in bfloat16 but products and moves of whole arrays: to write a slice it
    converts the array there and back. Of bits it makes a copy at most, where the array changes its type in a loop.
    """

    plain = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=axis)

    def of_bits(old: Array, new: Array) -> Array:
        bits = BITS[old.dtype.itemsize]
        written = plain(*(jax.lax.bitcast_convert_type(x, bits) for x in (old, new)))
        return jax.lax.bitcast_convert_type(written, old.dtype)

    if not (jnp.issubdtype(old.dtype, jnp.floating) and old.dtype.itemsize in BITS):
        return plain(old, new)
    return jax.lax.platform_dependent(old, new, cpu=of_bits, default=plain)
