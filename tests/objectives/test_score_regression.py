"""Masks, weights and targets of regressions, on plain arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.policy_loss.gbpo import bounded_ratio, signed_ratio_distance
from jaxrl_llm.algorithms.score_function.rec_off_policy_reinforce import clip_mask, score_weight
from jaxrl_llm.algorithms.score_function.rover import bellman_target, next_action_value

RHO, A = jnp.array([1.349859, 1.349859, 0.301194, 0.301194]), jnp.array([0.5, -0.5, -0.5, 0.5])


@pytest.mark.parametrize(
    ("shape", "kept"),
    [("none", [1, 1, 1, 1]), ("one-side", [0, 1, 0, 1]), ("two-side", [0, 0, 0, 0]), ("ring", [0, 0, 0, 1])],
)
def test_clip_masks_of_the_worked_example(shape: str, kept: list[int]) -> None:
    np.testing.assert_array_equal(clip_mask(shape, RHO, A, 0.2, 0.2, 0.6, 2.0), np.array(kept, bool))


def test_score_weights_are_finite() -> None:
    np.testing.assert_array_equal(score_weight("none", RHO, A), jnp.ones(4))
    np.testing.assert_array_equal(score_weight("importance", RHO, A), RHO)
    np.testing.assert_allclose(score_weight("advantage", RHO, A, 0.5), np.exp(2 * np.asarray(A)), rtol=1e-6)
    assert np.isfinite(score_weight("advantage", RHO, 1e6 * A)).all()


def test_ratios_to_aim_at() -> None:
    np.testing.assert_allclose(bounded_ratio(jnp.array([-1e9, 0, 1e9]), 0.3, 0.5), [0.7, 1.1, 1.5], rtol=1e-6)
    value, by = jax.value_and_grad(lambda rho: signed_ratio_distance(rho, jnp.float32(1.3), jnp.float32(-2)))(1.0)
    assert (float(value), float(by)) == pytest.approx((0.6, -2))
    at_target = jax.grad(lambda rho: signed_ratio_distance(rho, jnp.float32(1.25), jnp.float32(2)))(1.25)
    assert float(at_target) == 0


def test_the_value_of_the_next_action_wherever_it_is() -> None:
    values = jnp.array([[1.0, 2, 3, 4], [5, 6, 7, jnp.nan], [1, 1, 1, 1]])
    mask = jnp.array([[True, False, True, True], [False, True, True, False], [False, False, False, False]])
    np.testing.assert_array_equal(next_action_value(values, mask), [[3, 0, 4, 0], [0, 7, 0, 0], [0, 0, 0, 0]])


def test_bellman_target_of_the_worked_example() -> None:
    target = bellman_target(jnp.array([0.5, 0.5]), jnp.array([-0.013963, 0.0]))
    np.testing.assert_allclose(target, [0.486037, 0.5], atol=1e-6)
