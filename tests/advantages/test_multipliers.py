"""Multipliers of advantages: values outside the mask do not matter, and nothing is divided by zero."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.multipliers import capped_bonus, entropy_scaled, standard_scores, token_moments
from jaxrl_llm.algorithms.credit.dgpo_distribution_guided import softmax_shares
from jaxrl_llm.algorithms.credit.erpo_entropy_regulated import position_keys, regulated
from jaxrl_llm.algorithms.credit.hapo_heterogeneous import entropy_level, length_weighted_advantage, log_entropy_scale
from jaxrl_llm.algorithms.exploration.ettrl import relative_confidence
from jaxrl_llm.algorithms.exploration.xrpo import novelty
from jaxrl_llm.algorithms.regularisation.dcpo_distribution_centric import mixture_share

close = np.testing.assert_allclose
MASK = jnp.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
X = jnp.where(MASK, jnp.array([[1.0, 3, 9, 5], [9, 9, 9, 9], [2, 2, 2, 2]]), jnp.nan)
KEYS = jnp.array([4, 4, 7])


def test_moments_are_over_the_masked_tokens_of_a_key() -> None:
    count, mean, deviation = token_moments(X, MASK, KEYS)
    close(count[:, 0], [3, 3, 4])
    close(mean[:, 0], [3, 3, 2])
    close(deviation[:, 0], [np.sqrt(8 / 3), np.sqrt(8 / 3), 0], rtol=1e-6)
    z = standard_scores(X, MASK, KEYS, epsilon=0.0)
    close(z[0], np.array([-2, 0, 0, 2]) / np.sqrt(8 / 3), rtol=1e-6)
    assert not np.asarray(z[1:]).any()


def test_places_of_rows() -> None:
    index = jnp.array([[0, 1, -1, 2], [-1, -1, -1, -1], [0, 1, 2, 3]])
    keys = np.asarray(position_keys(KEYS, index, jnp.array([3.0, 0, 4]), 2))
    np.testing.assert_array_equal(keys[0, [0, 1, 3]], [0, 0, 1])
    np.testing.assert_array_equal(keys[2], [2, 2, 3, 3])


def test_shares_have_mean_one() -> None:
    shares = np.asarray(softmax_shares(X * 50, MASK, 0.5))
    close(shares.sum(axis=1), [3, 0, 4], rtol=1e-6)
    close(shares[2], np.ones(4))


def test_bonuses_are_capped_and_factors_clamped() -> None:
    A, bonus = jnp.array([1.0, 1, -1, -1, 0]), jnp.array([0.2, 5, 5, -5, 5])
    close(capped_bonus(A, bonus, 0.5), [1.2, 1.5, -0.5, -1, 0])
    close(entropy_scaled(A[:2], jnp.array([-5.0, 1]), 0.3), [-0.5, 1.3], rtol=1e-6)
    close(entropy_scaled(A[:2], jnp.array([-5.0, 1]), 0.3, clamp=True), [0, 1.3], rtol=1e-6)
    ones = jnp.ones((3, 4))
    close(regulated(2 * ones, 0.3 * ones, 0 * ones, MASK, 0.2, "multiplicative")[0], 2 * np.asarray(MASK[0]))


def test_rows_that_take_no_part_and_groups_without_entropy() -> None:
    group = jnp.array([0, 0, 0, 1])
    close(relative_confidence(jnp.array([1.0, 3, jnp.nan, 0]), group), [1.5, 0.5, 1, 1])
    close(relative_confidence(jnp.array([0.1, 9, 0.1, 0]), group, clamp=True)[1], 0)
    close(novelty(jnp.array([-1.0, -1, jnp.nan, -3]), group), np.zeros(4))
    close(mixture_share(jnp.array(0.3), 0.1, jnp.array(0.0)), 0)


def test_levels_of_equal_or_no_entropies_are_zero() -> None:
    for mask in (MASK, MASK & False):
        scale = log_entropy_scale(jnp.full((3, 4), 0.7), mask)
        assert np.isfinite(np.asarray(scale)).all()
        level = np.asarray(entropy_level(jnp.full((3, 4), 0.7), scale))
        assert np.isfinite(level).all()
    assert not np.asarray(entropy_level(jnp.full((3, 4), 0.7), log_entropy_scale(jnp.full((3, 4), 0.7), MASK))).any()


def test_rows_weighted_by_length() -> None:
    reward, length = jnp.array([1.0, 0, jnp.nan, 0.3]), jnp.array([3.0, 1, 5, 4])
    A = length_weighted_advantage(reward, length, jnp.array([0, 0, 0, 1]))
    close(A, [0.25 / np.sqrt(3 / 16), -0.75 / np.sqrt(3 / 16), 0, 0], rtol=1e-4)
