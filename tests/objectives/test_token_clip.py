"""Clips with a range for each token, and the clip that keeps its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.credit.hapo_heterogeneous import level_bounds, redistributed
from jaxrl_llm.objectives.surrogates import bounded_loss, clipped_value, gradient_preserving_value

close = np.testing.assert_allclose


def test_above_the_range_the_gradient_is_scaled_not_cut() -> None:
    rho, A = jnp.array([1.5, 0.5, 1.1, 1.5, 0.5, 5e8]), jnp.array([1.0, -1, 1, -1, 1, 1])

    def value(logp: jax.Array) -> jax.Array:
        return gradient_preserving_value(jnp.exp(logp), A, 0.2, 0.28).sum()

    close(gradient_preserving_value(rho, A, 0.2, 0.28), clipped_value(rho, A, 0.2, 0.28), rtol=1e-6)
    close(jax.grad(value)(jnp.log(rho)), np.array([1.28, 0, 1.1, 1.5, 0.5, 1.28]) * np.asarray(A), rtol=1e-5)


def test_the_dual_clip() -> None:
    value, A = jnp.array([-50.0, -2, -50]), jnp.array([-1.0, -1, 1])
    close(bounded_loss(value, A, 3.0), [-3, -2, -50])
    close(bounded_loss(value, A, None), value)


def test_levels_widen_one_side_and_redistribute_by_movement() -> None:
    h, rho = jnp.array([-1, -0.632718, -0.316359, 0, 1]), jnp.array([1, 0.7, 1.05, 1.5, 1.15])
    low, high = level_bounds(h, 0.2, 0.2, 1.0)
    close(low, [0.4, 0.326544, 0.263272, 0.2, 0.2], atol=1e-6)
    close(high, [0.2, 0.2, 0.2, 0.2, 0.4], atol=1e-6)
    A = redistributed(jnp.ones(5), rho, h, low, high, 1.0)
    close(A, [0, 1, 0.683641, 1, 1], atol=1e-6)
    close(-clipped_value(rho, A, low, high), [0, -0.7, -0.717823, -1.2, -1.15], atol=1e-6)
    close(redistributed(jnp.ones(1), jnp.array([1.3]), jnp.array([1.0]), 0.2, 0.4, 1.0), [2.0])
