"""Groups balanced by dropping bad samples."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.score_function.rec_off_policy_reinforce import balanced


def test_bad_samples_are_dropped_until_there_are_no_more_than_good_ones() -> None:
    reward = jnp.array([1.0, 0, 0, 0, 1, 1, 0, jnp.nan, 0.5])
    group = jnp.array([0, 0, 0, 0, 1, 1, 1, 0, 2])
    noise = jnp.array([0.9, 0.3, 0.8, 0.1, 0, 0, 0, 0.9, 0.5])
    expected = [True, False, False, True, True, True, True, False, True]
    np.testing.assert_array_equal(balanced(reward, group, noise), expected)
