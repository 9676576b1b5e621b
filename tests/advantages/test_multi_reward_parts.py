"""Helpers for several rewards: parsed weights, components, and checks of attempts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.multi_reward import (
    check_rewards,
    decoupled_advantage,
    parse_weights,
    passes_all,
    variance_weighted_advantage,
)
from jaxrl_llm.utils.errors import InputError

GROUP = jnp.array([0, 0, 0, 0, 1, 1])
VALUES = jnp.array([[1.0, 0.3], [0, 0.1], [0, 0.9], [1, 0.2], [0, 0.3], [1, 0.4]])
WEIGHTS = jnp.array([1.0, 0.5])


def test_weights_are_read_from_a_text() -> None:
    assert parse_weights(" right = 1, form=-0.5,a=b=2 ") == {"right": 1.0, "form": -0.5, "a=b": 2.0}
    assert parse_weights("") == {}
    with pytest.raises(InputError, match="see 'right'"):
        parse_weights("form=1,right")


@pytest.mark.parametrize("advantage", [decoupled_advantage, variance_weighted_advantage])
def test_a_component_that_is_missing_or_constant_adds_nothing(advantage: object) -> None:
    f = jax.jit(advantage)  # type: ignore[arg-type]
    alone = f(jnp.where(jnp.arange(2) == 0, VALUES, jnp.nan), WEIGHTS, GROUP)
    constant = f(jnp.where(jnp.arange(2) == 0, VALUES, 0.7), WEIGHTS, GROUP)
    np.testing.assert_allclose(alone, constant, atol=1e-6)
    assert np.isfinite(alone).all()
    assert (np.asarray(f(jnp.full_like(VALUES, 0.1), WEIGHTS, GROUP)) == 0).all()
    # A missing score is left out of its component's statistics only.
    some = f(VALUES.at[2, 1].set(jnp.nan), WEIGHTS, GROUP)
    moved = f(VALUES.at[2, 1].set(jnp.nan).at[:, 1].add(5.0), WEIGHTS, GROUP)
    np.testing.assert_allclose(some, moved, atol=2e-5)


def test_reward_scales_cancel() -> None:
    f = jax.jit(lambda values: decoupled_advantage(values, WEIGHTS, GROUP, epsilon=0.0))
    np.testing.assert_allclose(f(VALUES * jnp.array([10.0, 3.0])), f(VALUES), atol=1e-5)


def test_rare_and_lonely_checks_are_worth_more() -> None:
    passed = jnp.array([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 1]])[:, None]
    attempted, group = jnp.ones((3, 1), bool), jnp.zeros(3, jnp.int32)
    f = jax.jit(lambda exists: check_rewards(jnp.where(exists, passed, jnp.nan), attempted, group)[:, 0])
    worth = f(np.array([True, True, True, True]))
    assert worth[0] > worth[1]
    # Two easy checks with equal pass rates share the weight of one; without checks the reward is 0.
    one, two = f(np.array([True, False, False, False])), f(np.array([True, True, False, False]))
    np.testing.assert_allclose(one, two, rtol=1e-5)
    assert (np.asarray(f(np.zeros(4, bool))) == 0).all()


def test_success_is_of_the_last_attempt() -> None:
    passed = jnp.array([[[1.0, 1], [0, 1]], [[0, 1], [1, 1]], [[1, 1], [0, 0]], [[1, jnp.nan], [0, 0]]])
    attempted = jnp.array([[True, True], [True, True], [True, False], [True, False]])
    assert passes_all(passed, attempted).tolist() == [0, 1, 1, 1]
    assert passes_all(passed, jnp.zeros((4, 2), bool)).tolist() == [0, 0, 0, 0]
    assert passes_all(jnp.full((4, 2, 2), jnp.nan), attempted).tolist() == [0, 0, 0, 0]
