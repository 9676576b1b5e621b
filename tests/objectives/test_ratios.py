"""Importance ratios against each source, with tokens of weight 0 and extreme values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.log_ratios import LARGEST, SOURCES, log_ratio, source
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.objectives import token_ratio
from jaxrl_llm.utils.errors import InputError

LOGP = [[-1.0, -2.0, -0.5], [-0.25, -3.0, -1.0]]
MASK = [[0, 1, 1], [1, 1, 0]]


def batch_of(**fields: Any) -> Trajectories:
    zeros, row = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    mask = jnp.asarray(MASK, bool)
    return Trajectories(zeros, zeros == 0, mask, jnp.zeros((2, 3)), zeros, zeros, row, row, row > 0).replace(**fields)


def outputs_of(logp: Any) -> PolicyOutputs:
    return PolicyOutputs(jnp.asarray(logp, jnp.float32), jnp.zeros((2, 3)))


@pytest.mark.parametrize("against", ["behaviour", "untruncated", "old", "reference", "previous"])
def test_each_source(against: str) -> None:
    others = {name: jnp.full((2, 3), -float(i)) for i, name in enumerate(SOURCES.values())}
    batch = batch_of(**others)
    shift = {"behaviour": 0.0, "untruncated": -1.0, "old": -2.0, "reference": -3.0, "previous": -4.0}[against]
    expected = np.where(MASK, np.exp(np.array(LOGP) - shift), 1.0)
    np.testing.assert_allclose(token_ratio(against)(outputs_of(LOGP), batch), expected, rtol=1e-6)
    assert source(batch, against) is others[SOURCES[against]]


def test_the_default_is_the_behaviour_policy() -> None:
    batch = batch_of(behaviour_logp=jnp.asarray(LOGP))
    assert token_ratio()(outputs_of(LOGP), batch).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_what_does_not_count_has_ratio_one_whatever_it_holds() -> None:
    bad = jnp.array([[jnp.nan, 0, 0], [0, 0, jnp.inf]])
    weights = jnp.array([[1.0, 1.0, 0.0], [1.0, 2.0, 1.0]])
    batch = batch_of(behaviour_logp=bad.at[0, 2].set(jnp.nan), weights=weights)

    def total(logp: jax.Array) -> jax.Array:
        return jnp.sum(token_ratio()(outputs_of(logp), batch))

    value, gradient = jax.value_and_grad(total)(jnp.asarray(LOGP).at[1, 2].set(jnp.nan))
    kept = np.exp([-2.0, -0.25, -3.0])
    assert float(value) == pytest.approx(3 + kept.sum(), rel=1e-6)
    np.testing.assert_allclose(gradient, [[0, kept[0], 0], [kept[1], kept[2], 0]], rtol=1e-6)


@pytest.mark.parametrize("difference", [-1e30, -1000.0, -21.0, 21.0, 1000.0, 1e30, np.inf, -np.inf])
def test_huge_differences_stay_finite(difference: float) -> None:
    bounded = log_ratio(jnp.array(difference), jnp.array(0.0), jnp.array(True))
    assert float(bounded) == np.sign(difference) * LARGEST

    def squared(logp: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(log_ratio(logp, jnp.array(0.0), jnp.array(True))) ** 2)

    value, gradient = jax.value_and_grad(squared)(jnp.array(difference))
    assert np.isfinite(value)
    assert np.isfinite(gradient)


def test_a_difference_within_the_bound_is_exact() -> None:
    assert float(log_ratio(jnp.array(-1.5), jnp.array(-20.25), jnp.array(True))) == 18.75


def test_an_unknown_source_or_one_that_is_missing_is_refused() -> None:
    with pytest.raises(InputError, match="'prior'"):
        source(batch_of(), "prior")
    with pytest.raises(InputError, match="old_logp"):
        token_ratio("old")(outputs_of(LOGP), batch_of())


def test_an_unknown_source_is_refused_before_there_is_a_batch() -> None:
    with pytest.raises(InputError, match="did you mean 'behaviour'"):
        token_ratio("behavior")
