"""Products of rows with the matrices of their groups, and their gradients, as each compiler takes them best.

The TPU compiler has a kernel for the product of sorted rows with a matrix for each group of rows, which the gradient of
rows is too. The gradient of the matrices it computes as a product of all rows for each group: over E groups that is E
times the operations, and as many copies of the rows. Here it is a loop over blocks of rows instead.

XLA for CPUs computes all of them as products of all rows with all matrices. They are written out here, so that there is
less to compile: without transposed copies, and with what they have in common computed once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.half_products import by_rows, matmul, over_rows
from jaxrl_kernels.partition import vary_together, zeros

from jaxrl_llm.core.trajectory import Array

# Rows of a block on TPUs: their product with each other takes v5e as long as the sums that it is added to take through
# its memory.
ROWS = 1024


class Groups(NamedTuple):
    """Of which of E groups M rows are: those of the first come first, and so on; at the end may be some of none."""

    sizes: Array  # int32[E], how many rows each has
    of_row: Array  # int32[M], each row's; E where it has none
    own: Array  # bool[M, E], whether a row is of a group


def groups_of(of_row: Array, count: int) -> Groups:
    """The groups of rows, int32[M] in rising order."""
    own = of_row[:, None] == jnp.arange(count)
    return Groups(jnp.sum(own, axis=0, dtype=jnp.int32), of_row, own)


def ragged_dot(x: Array, w: Array, groups: Groups) -> Array:
    """Rows x [M, K] times the matrices of their groups, w [E, K, N]: [M, N].

    Rows of no group are not defined, also in the gradient of x.
    """
    return _ragged_dot(*vary_together(x, w, groups))


@jax.custom_vjp
def _ragged_dot(x: Array, w: Array, groups: Groups) -> Array:
    return jax.lax.platform_dependent(x, w, groups, cpu=_dense, default=_by_compiler)


def _backward(residuals: tuple[Array, Array, Groups], dy: Array) -> tuple[Array, Array, None]:
    x, w, groups = residuals
    dx = jax.lax.platform_dependent(dy, w, groups, cpu=_dense_of_rows, default=_of_rows)
    return dx, of_matrices(x, dy, groups), None


_ragged_dot.defvjp(lambda x, w, groups: (_ragged_dot(x, w, groups), (x, w, groups)), _backward)


def of_matrices(x: Array, dy: Array, groups: Groups) -> Array:
    """The gradient [E, K, N] of the matrices, of that of outputs dy [M, N] of `ragged_dot`, in the dtype of x.

    Rows of no group count nothing, but have to be finite.
    """
    return jax.lax.platform_dependent(x, dy, groups, cpu=_dense_of_matrices, tpu=by_blocks, default=_of_matrices)


def _by_compiler(x: Array, w: Array, groups: Groups) -> Array:
    return jax.lax.ragged_dot(x, w, groups.sizes)


def _of_rows(dy: Array, w: Array, groups: Groups) -> Array:
    return _by_compiler(dy, w.swapaxes(1, 2), groups)


def _of_matrices(x: Array, dy: Array, groups: Groups) -> Array:
    w = zeros((len(groups.sizes), x.shape[1], dy.shape[1]), x.dtype, x)
    (dw,) = jax.vjp(lambda w: _by_compiler(x, w, groups), w)[1](dy)
    return dw


def _dense(x: Array, w: Array, groups: Groups) -> Array:
    return matmul(_apart(x, groups), w.reshape(-1, w.shape[2]))


def _dense_of_rows(dy: Array, w: Array, groups: Groups) -> Array:
    each = by_rows(dy, w.reshape(-1, w.shape[2])).reshape(len(dy), *w.shape[:2])
    return jnp.sum(each * groups.own[:, :, None], axis=1).astype(dy.dtype)


def _dense_of_matrices(x: Array, dy: Array, groups: Groups) -> Array:
    return over_rows(_apart(x, groups), dy).astype(x.dtype).reshape(len(groups.sizes), -1, dy.shape[1])


def _apart(x: Array, groups: Groups) -> Array:
    """Rows [M, E * K] that have those of x [M, K] at the place of their group, and zeros elsewhere."""
    return (x[:, None] * groups.own[:, :, None]).reshape(len(x), -1)


def by_blocks(x: Array, dy: Array, groups: Groups, block: int = ROWS) -> Array:
    """`of_matrices`, a block of rows and a group that has some of them at a time, summed in float32."""
    (M, K), N, E = x.shape, dy.shape[1], len(groups.sizes)
    blocks, sizes = -(-M // block), groups.sizes
    ends = jnp.cumsum(sizes)
    first = (ends - sizes) // block
    steps = jnp.cumsum(jnp.where(sizes > 0, (ends - 1) // block - first + 1, 0))  # of each group and those before it
    missing = blocks * block - M
    x, dy = (jnp.pad(y, ((0, missing), (0, 0))) for y in (x, dy))
    of_row = jnp.pad(groups.of_row, (0, missing), constant_values=E)

    def go_on(carry: tuple[Array, Array]) -> Array:
        # The first bound is never reached before the second: it says how often the loop runs at most.
        return (carry[0] < blocks + E - 1) & (carry[0] < steps[-1])

    def add(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        step, sums = carry
        group = jnp.searchsorted(steps, step, side="right")
        number = first[group] + step - jnp.where(group > 0, steps[group - 1], 0)
        a, b, of = (jax.lax.dynamic_slice_in_dim(y, number * block, block) for y in (x, dy, of_row))
        a = jnp.where((of == group)[:, None], a, 0)
        product = jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=sums.dtype)
        return step + 1, sums.at[group].add(product)

    start = zeros((), jnp.int32, x), zeros((E, K, N), jnp.promote_types(x.dtype, jnp.float32), x)
    return jax.lax.while_loop(go_on, add, start)[1].astype(x.dtype)
