"""Products of rows with the matrices of their groups, on CPUs and as TPUs take their gradients, by a loop."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.layers.ragged import by_blocks, groups_of, ragged_dot

K, N = 5, 3


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rows_of(sizes: Sequence[int], without: int) -> np.ndarray:
    """The group of each row, and rows of none at the end."""
    return np.repeat(np.arange(len(sizes) + 1), [*sizes, without])


@pytest.mark.parametrize(
    "sizes, without", [((3, 0, 6, 2), 0), ((0, 0, 9, 0), 2), ((0, 0, 0, 0), 4), ((11, 1, 1, 1), 3)]
)
def test_products_and_gradients_by_loop(sizes: tuple[int, ...], without: int) -> None:
    of_row, E = rows_of(sizes, without), len(sizes)
    M = len(of_row)
    x, w, dy = draw(0, M, K), draw(1, E, K, N), draw(2, M, N)
    dy = jnp.where(jnp.asarray(of_row < E)[:, None], dy, 0)
    groups = groups_of(jnp.asarray(of_row, jnp.int32), E)
    np.testing.assert_array_equal(groups.sizes, sizes)
    y, back = jax.vjp(lambda x, w: ragged_dot(x, w, groups), x, w)
    dx, dw = back(dy)
    for group in range(E):
        own = np.flatnonzero(of_row == group)
        np.testing.assert_allclose(y[own], x[own] @ w[group], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dx[own], dy[own] @ w[group].T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw[group], x[own].T @ dy[own], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 4, 5, 32])
@pytest.mark.parametrize("sizes, without", [((3, 0, 6, 2), 0), ((0, 0, 9, 0), 3), ((0, 0, 0, 0), 4), ((4, 4, 4, 4), 4)])
def test_blocks_give_the_gradient_of_matrices(block: int, sizes: tuple[int, ...], without: int) -> None:
    """Rows of no group may hold anything in x."""
    of_row = rows_of(sizes, without)
    E, some = len(sizes), jnp.asarray(of_row < len(sizes))[:, None]
    x = jnp.where(some, draw(0, len(of_row), K), jnp.nan)
    dy = jnp.where(some, draw(2, len(of_row), N), 0)
    found = by_blocks(x, dy, groups_of(jnp.asarray(of_row, jnp.int32), E), block)
    for group in range(E):
        own = np.flatnonzero(of_row == group)
        np.testing.assert_allclose(found[group], x[own].T @ dy[own], rtol=1e-5, atol=1e-5)


def test_sums_of_bfloat16_rows_are_in_float32() -> None:
    """Beyond 256 a sum in bfloat16 would not grow by ones."""
    x, dy = jnp.ones((1024, 1), jnp.bfloat16), jnp.ones((1024, 1), jnp.bfloat16)
    found = by_blocks(x, dy, groups_of(jnp.zeros(1024, jnp.int32), 1), block=1)
    assert float(found[0, 0, 0]) == 1024
