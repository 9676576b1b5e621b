"""Risk measures and draws: worked examples, and groups of different sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.risk import (
    LEVELS,
    bundled_risk,
    form_draws,
    mixed_risk,
    seeking_risk,
    share_of_draws,
    spread,
    track_quantiles,
)  # fmt: skip
from jaxrl_llm.utils.errors import InputError

DRAWS = jax.jit(form_draws, static_argnames="ragged")


def test_risk_measures_worked_example() -> None:
    X, around = jnp.array([0, 1, 2.5, 4, 5]), (1.0, 4.0, 0.2, 0.8, 1.5)
    np.testing.assert_allclose(mixed_risk(X, *around, centred=True), [-5, -2, -1, 0, 0], atol=3e-5)
    np.testing.assert_allclose(mixed_risk(X, *around), [-3, 0, 1, 2, 2], atol=3e-5)
    np.testing.assert_allclose(seeking_risk(X, *around), [0, 0, 1, 2, 5], atol=3e-5)


def test_a_bundle_worked_example() -> None:
    reward, group = jnp.array([1.0, 0, 1, 0, 0, 1]), jnp.array([0, 0, 0, 1, 1, 1])
    draws = DRAWS(reward, group, jnp.zeros(6, jnp.int32), jnp.array([0, 1, 2] * 2))
    np.testing.assert_allclose(draws.scores[0, :3], [1, 0, 2])
    assert np.asarray(draws.mask).sum() == 3
    A = mixed_risk(draws.scores, 0.5, 1.5, 0.2, 0.8, 1.5) / (spread(draws.scores, draws.mask) + 1e-6)
    np.testing.assert_allclose(A[0, :3], [0.333333, -1.5, 0.666667], atol=2e-5)
    shares = share_of_draws(A, reward, group, draws, "sum_mean")
    np.testing.assert_allclose(shares, [1 / 6, -1, 2 / 9, 1 / 6, -0.5, 4 / 9], atol=2e-5)


def test_a_quantile_worked_example() -> None:
    q = track_quantiles(jnp.full(len(LEVELS), 1.5), jnp.array([0.0, 1, 1, 2, 3]), jnp.ones(5, bool), 0.1)
    assert q[LEVELS.index(0.2)] == pytest.approx(1.46, abs=1e-6)
    assert (track_quantiles(q, jnp.zeros(2), jnp.zeros(2, bool), 0.1) == q).all()


def test_groups_of_unlike_size() -> None:
    reward = jnp.array([1.0, 0, 0.5, 2, 4, jnp.nan, 8])
    group = jnp.array([0, 0, 0, 1, 1, 1, 2])
    draws = DRAWS(reward, group, jnp.zeros(7, jnp.int32), jnp.arange(7.0))
    np.testing.assert_allclose(draws.scores[0, :4], [11, 12, 10.5, 0])
    A = jnp.zeros((7, 7)).at[0, :3].set(jnp.array([3.0, 6, 9]))
    np.testing.assert_allclose(share_of_draws(A, reward, group, draws, "uniform"), [3, 6, 9, 6, 6, 0, 6])
    fewer = DRAWS(reward, group, jnp.zeros(7, jnp.int32), jnp.arange(7.0), ragged="smallest")
    assert np.asarray(fewer.mask).sum() == 1
    np.testing.assert_allclose(share_of_draws(A, reward, group, fewer, "uniform"), [3, 0, 0, 3, 0, 0, 3])


def test_a_constant_score_has_spread_one() -> None:
    assert spread(jnp.full((1, 3), 0.7), jnp.ones((1, 3), bool))[0, 0] == 1
    assert spread(jnp.array([[0.7, 5.0]]), jnp.array([[True, False]]))[0, 0] == 1


def test_bad_numbers_are_refused() -> None:
    for wrong in ({"alpha": 0.0}, {"beta": 1.0}, {"bundle_size": 0}, {"risk": "none"}):
        with pytest.raises(InputError):
            bundled_risk(**wrong)
