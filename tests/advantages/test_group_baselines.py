"""Baselines by key against loops, on groups of one, equal values and unscored values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.filters import drop_rows, drop_small_advantages
from jaxrl_llm.advantages.group import BASELINES, above_baseline, group_advantage, standardised
from jaxrl_llm.algorithms.score_function.passk_grpo import margin_over_second
from jaxrl_llm.core.buckets import bucket_best, bucket_quantile, masked_quantile
from jaxrl_llm.utils.errors import InputError

KEYS = np.array([5, 2, 5, 2, 5, 9, 2, 5, 7])
VALUES = np.array([0.5, 1.0, 0.25, 0.0, np.nan, 2.0, 0.75, 1.5, np.nan])
WEIGHTS = np.array([1.0, 3, 2, 1, 5, 1, 2, 4, 1])
N = len(KEYS)
compiled = jax.jit(above_baseline, static_argnames="baseline")


def scored(i: int) -> list[int]:
    return [j for j in range(N) if KEYS[j] == KEYS[i] and not np.isnan(VALUES[j])]


@pytest.mark.parametrize("baseline", BASELINES)
def test_it_is_the_loop(baseline: str) -> None:
    expected = np.zeros(N)
    for i in range(N):
        if np.isnan(VALUES[i]):
            continue
        r, others = VALUES[scored(i)], [j for j in scored(i) if j != i]
        expected[i] = (
            VALUES[i]
            - {
                "mean": r.mean(),
                "leave_one_out": VALUES[others].mean() if others else VALUES[i],
                "weighted": (WEIGHTS[scored(i)] * r).sum() / WEIGHTS[scored(i)].sum(),
                "median": np.median(r),
                "quantile": np.quantile(r, 0.3),
                "best": r.max(),
                "none": 0.0,
            }[baseline]
        )
    values, weights = jnp.asarray(VALUES, jnp.float32), jnp.asarray(WEIGHTS, jnp.float32)
    found = compiled(values, jnp.asarray(KEYS), baseline, weights=weights, level=0.3)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    equal = compiled(jnp.full(N, 1 / 3), jnp.asarray(KEYS), baseline, weights=jnp.ones(N), level=0.3)
    assert baseline == "none" or (equal == 0).all()


def test_quantiles_and_the_best() -> None:
    values, keys = jnp.asarray(VALUES, jnp.float32), jnp.asarray(KEYS)
    for i in range(N):
        r = VALUES[scored(i)]
        assert bucket_best(keys, values)[i] == (r.max() if len(r) else 0)
        wanted = np.quantile(r, 0.8) if len(r) else 0
        assert bucket_quantile(keys, values, 0.8)[i] == pytest.approx(wanted, rel=1e-6)
    assert masked_quantile(jnp.ones(3), jnp.zeros(3, bool), 0.5) == 0
    with pytest.raises(InputError, match="level"):
        masked_quantile(jnp.ones(3), jnp.ones(3, bool), 1.5)


def test_the_margin_is_only_that_of_one_best() -> None:
    values = jnp.array([0.9, 0.5, 0.2, 0.4, 1.0, 1.0, 0.0, jnp.nan, 3.0])
    keys = jnp.array([0, 0, 0, 0, 1, 1, 1, 0, 2])
    np.testing.assert_allclose(margin_over_second(values, keys), [0.4, 0, 0, 0, 0, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("scale", ["batch", "sum", "mean"])
def test_scales_of_group_advantages(scale: str) -> None:
    reward, group = np.array([1.0, 0, 0, 1, 0.5, 0.5]), np.array([0, 0, 0, 1, 1, 2])
    found = group_advantage(jnp.asarray(reward, jnp.float32), jnp.asarray(group), scale=scale)
    for i in range(6):
        r = reward[group == group[i]]
        deviation = r.std(ddof=1) if len(r) > 1 else 0.0
        divisor = {"batch": reward.std(ddof=1), "sum": deviation + reward.std(ddof=1), "mean": r.mean()}[scale]
        assert found[i] == pytest.approx((reward[i] - r.mean()) / (divisor + 1e-6), abs=1e-6)
    with pytest.raises(InputError, match="baseline"):
        group_advantage(jnp.ones(2), jnp.zeros(2, jnp.int32), baseline="mode")


def test_equal_values_are_standardised_to_nothing() -> None:
    assert (standardised(jnp.full(4, 0.1)) == 0).all()
    found = standardised(jnp.array([1.0, 2.0, jnp.nan, 3.0]))
    np.testing.assert_allclose(found, [-1, 0, 0, 1], atol=1e-6)


def test_rows_are_dropped_by_what_a_function_says_or_by_the_size_of_advantages() -> None:
    from test_group import batch_of

    A = np.array([[0.5, 0.0], [0.01, 0.9], [-0.02, -0.3]], np.float32)
    batch = batch_of([1, 0, 1], [0, 0, 0], [[1, 1], [1, 0], [1, 1]], advantages=jnp.asarray(A))
    kept = drop_small_advantages(0.1).apply((), batch)[1].loss_weights
    assert np.asarray(kept).tolist() == [[1, 1], [0, 0], [1, 1]]
    again = drop_rows(lambda b: b.scores == 0).apply((), batch.replace(weights=jnp.full((3, 2), 0.5)))[1]
    assert np.asarray(again.weights).tolist() == [[0.5, 0.5], [0, 0], [0.5, 0.5]]
    with pytest.raises(InputError, match="least"):
        drop_small_advantages(-1.0)
