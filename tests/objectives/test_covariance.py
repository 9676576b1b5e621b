"""Covariance terms, and the selection of tokens by covariance."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.objectives.covariance import covariance_terms, first_k


def test_worked_example() -> None:
    A, logp = jnp.array([1.0, 1, -1, -1, 1, -1]), jnp.array([-0.1, -3, -0.2, -4, -0.5, -1])
    expected = [1.366667, -1.533333, -1.266667, 2.533333, 0.966667, -0.466667]
    np.testing.assert_allclose(covariance_terms(A, logp, jnp.ones(6, bool)), expected, atol=1e-6)


def test_masked_values_take_no_part() -> None:
    x = jnp.array([[1.0, jnp.nan], [3.0, 2.0]])
    found = covariance_terms(x, x, jnp.array([[True, False], [True, True]]))
    np.testing.assert_allclose(found, [[1, 0], [1, 0]], atol=1e-6)
    assert (np.asarray(covariance_terms(x, x, jnp.zeros((2, 2), bool))) == 0).all()


def test_the_first_of_an_order_with_ties() -> None:
    value, tie = jnp.array([[2.0, 1.0, 1.0, 0.0]]), jnp.array([[0.0, 0.9, 0.1, 0.5]])
    mask = jnp.array([[True, True, True, False]])
    np.testing.assert_array_equal(first_k((value, tie), mask, jnp.float32(1)), [[False, False, True, False]])
    np.testing.assert_array_equal(first_k((value, tie), mask, jnp.float32(2)), [[False, True, True, False]])
    np.testing.assert_array_equal(first_k((value, tie), mask, jnp.float32(9)), mask)
