"""Statistics by key against numpy loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages.functional import bucket_moments, bucket_sums

N = 8
SCORES = st.lists(
    st.one_of(st.floats(-10, 10, width=32), st.just(float("nan")), st.sampled_from([0.0, 1.0])), min_size=N, max_size=N
)
compiled = jax.jit(bucket_moments, static_argnums=2)
KEYS = st.lists(st.integers(-3, 3), min_size=N, max_size=N)


def moments_by_loop(keys: np.ndarray, values: np.ndarray, ddof: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count, mean, deviation = np.zeros(len(keys)), np.zeros(len(keys)), np.zeros(len(keys))
    for i, key in enumerate(keys):
        mine = [float(v) for k, v in zip(keys, values, strict=True) if k == key and not np.isnan(v)]
        count[i] = len(mine)
        mean[i] = sum(mine) / len(mine) if mine else 0.0
        if len(mine) > ddof:
            deviation[i] = (sum((v - mean[i]) ** 2 for v in mine) / (len(mine) - ddof)) ** 0.5
    return count, mean, deviation


def test_sums_by_hand() -> None:
    keys = jnp.array([7, -1, 7, 0, -1, 7])
    ones, squares = bucket_sums(keys, jnp.ones(6), jnp.arange(6.0) ** 2)
    assert ones.tolist() == [3, 2, 3, 1, 2, 3]
    assert squares.tolist() == [29, 17, 29, 9, 17, 29]


def test_moments_by_hand() -> None:
    keys, values = jnp.array([5, 5, 2, 5, 2]), jnp.array([1.0, 2.0, 4.0, 6.0, jnp.nan])
    count, mean, deviation = bucket_moments(keys, values)
    assert count.tolist() == [3, 3, 1, 3, 1]
    assert mean.tolist() == [3, 3, 4, 3, 4]
    np.testing.assert_allclose(deviation, [7**0.5, 7**0.5, 0, 7**0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(bucket_moments(keys, values, ddof=0)[2][0], (14 / 3) ** 0.5, rtol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(keys=KEYS, values=SCORES)
def test_moments_are_those_of_a_loop(ddof: int, keys: list[int], values: list[float]) -> None:
    expected = moments_by_loop(np.array(keys), np.array(values), ddof)
    found = compiled(jnp.array(keys), jnp.array(values, jnp.float32), ddof)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -123456.7, 1e9 / 7, 3e38, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 64, 1000])
def test_equal_values_have_no_deviation_at_all(value: float, size: int) -> None:
    _, mean, deviation = compiled(jnp.zeros(size, jnp.int32), jnp.full(size, value, jnp.float32), 1)
    assert (mean == np.float32(value)).all()
    assert (deviation == 0).all()


def test_a_large_offset_costs_no_precision() -> None:
    values = jnp.array([0.0, 1.0, 2.0, 3.0]) + 2.0**20
    _, mean, deviation = bucket_moments(jnp.zeros(4, jnp.int32), values)
    assert mean.tolist() == [2.0**20 + 1.5] * 4
    np.testing.assert_allclose(deviation, (5 / 3) ** 0.5, rtol=1e-6)


def test_a_bucket_without_scores_is_zero_and_touches_no_other() -> None:
    count, mean, deviation = bucket_moments(jnp.array([0, 0, 1]), jnp.array([jnp.nan, jnp.nan, 5.0]))
    assert count.tolist() == [0, 0, 1]
    assert mean.tolist() == [0, 0, 5]
    assert deviation.tolist() == [0, 0, 0]


def test_compiled_and_mapped_it_is_the_same() -> None:
    keys, values = jnp.array([[0, 1, 0, 1], [2, 2, 2, 3]]), jnp.array([[1.0, 2, 3, 5], [0, 1, 5, jnp.nan]])
    mapped = jax.jit(jax.vmap(bucket_moments))(keys, values)
    for row in range(2):
        for a, b in zip(mapped, bucket_moments(keys[row], values[row]), strict=True):
            np.testing.assert_allclose(a[row], b, rtol=1e-6)
