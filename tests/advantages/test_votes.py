"""Majority votes of a group on the right answer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.votes import majority

GROUP = jnp.array([3, 3, 3, 3, 1, 1, 1, 0])


def test_the_most_frequent_answer_wins_in_each_group() -> None:
    keys = jnp.array([5, 6, 5, -1, 5, 6, 6, -1])
    agree, share = majority(keys, GROUP, jnp.zeros(8))
    np.testing.assert_array_equal(agree, [1, 0, 1, 0, 0, 1, 1, 0])
    np.testing.assert_allclose(share, [0.5] * 4 + [2 / 3] * 3 + [0])


def test_priority_decides_a_tie_and_without_it_one_answer_wins() -> None:
    keys = jnp.array([5, 6, 5, 6, 2, 0, 1, 9])
    first, _ = majority(keys, GROUP, -jnp.arange(8.0))
    np.testing.assert_array_equal(first, [1, 0, 1, 0, 1, 0, 0, 1])
    last, _ = majority(keys, GROUP, jnp.arange(8.0))
    np.testing.assert_array_equal(last, [0, 1, 0, 1, 0, 0, 1, 1])
    some, _ = majority(keys, GROUP, jnp.zeros(8))
    np.testing.assert_array_equal([some[:4].sum(), some[4:7].sum()], [2, 1])
