"""Losses that couple the rows of a group, on plain arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives.preference.pairs import bucket_log_sum_exp, discriminative_shares, preference_shares

GROUP = jnp.zeros(4, jnp.int32)


def test_preferences_of_the_worked_example() -> None:
    h, reward = jnp.array([0.10, -0.05, 0.02, 0.0]), jnp.array([1.0, 0.4, 1.0, 0.0])
    shares = preference_shares(h, reward, GROUP, 0.1, best_scale=2.5)
    assert float(shares.sum()) == pytest.approx(0.685207, abs=1e-6)
    assert float(shares[3]) == 0, "the worst is preferred to none"
    with_unscored = preference_shares(
        jnp.append(h, 3.0), jnp.append(reward, jnp.nan), jnp.zeros(5, jnp.int32), 0.1, best_scale=2.5
    )
    np.testing.assert_allclose(with_unscored, [*shares, 0], rtol=1e-6)


def test_without_a_pair_each_answer_stands_alone() -> None:
    shares = preference_shares(jnp.array([0.1, -0.2]), jnp.ones(2), GROUP[:2])
    assert float(shares.sum()) == pytest.approx(0.721268, abs=1e-6)
    assert (np.asarray(preference_shares(jnp.ones(2), jnp.full(2, jnp.nan), GROUP[:2])) == 0).all()


def test_discrimination_of_the_worked_example() -> None:
    s, merit = jnp.array([-0.5, -0.8, -0.6, -1.0]), 1 - jnp.array([0.2, 0.8, 0.5, 0.6])
    right = jnp.array([True, True, False, False])

    def total(s: jax.Array) -> jax.Array:
        return discriminative_shares(s, right, ~right, GROUP, merit).sum()

    value, by = jax.value_and_grad(total)(s)
    assert float(value) == pytest.approx(0.297258, abs=1e-6)
    np.testing.assert_allclose(by, [0.997527, 0.002473, -0.509999, -0.490001], atol=1e-6)
    alone = discriminative_shares(s, right, jnp.zeros(4, bool), GROUP, merit)
    assert (np.asarray(alone) == 0).all(), "no wrong answer"


def test_log_sum_exp_by_bucket_is_finite_where_there_is_nothing() -> None:
    keys, values = jnp.array([3, 3, 7]), jnp.array([-1e4, -1e4, 2.0])
    mask = jnp.array([True, True, False])
    found = bucket_log_sum_exp(keys, values, mask)
    np.testing.assert_allclose(found, [-1e4 + np.log(2), -1e4 + np.log(2), 0], rtol=1e-6)
    by = jax.grad(lambda v: bucket_log_sum_exp(keys, v, mask)[0])(values)
    np.testing.assert_allclose(by, [0.5, 0.5, 0], atol=1e-6)
