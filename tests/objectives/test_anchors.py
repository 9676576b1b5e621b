"""Schedules of anchors and step sizes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.policy_loss.mdpo_mirror_descent import linear_step
from jaxrl_llm.algorithms.policy_loss.remix import stepwise_decay


def test_the_share_of_the_first_anchor_goes_down_in_steps() -> None:
    found = stepwise_decay(jnp.array([1, 50, 51, 61, 75, 91, 500.0]))
    np.testing.assert_allclose(found, [1, 1, 0.9, 0.8, 0.7, 0.5, 0.5], rtol=1e-6)


def test_step_sizes_never_reach_zero() -> None:
    np.testing.assert_allclose(linear_step(jnp.arange(5.0), 4), [1, 0.75, 0.5, 0.25, 0.25], rtol=1e-6)
    assert float(linear_step(3, None, 0.7)) == np.float32(0.7)
