"""The search for clip bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.policy_loss.bapo_adaptive_clip import bapo_adaptive_clip, contributions, search_bounds
from jaxrl_llm.utils.errors import InputError

RHO, A, ONES = jnp.array([1.5, 0.9, 0.5, 0.75, 1.1]), jnp.array([1.0, 1, -1, -1, -1]), jnp.ones(5)


@pytest.mark.parametrize(
    ("low", "high", "value", "gradient"),
    [
        (0.6, 1.2, (2.1, 2.45), (0.9, 1.85)),
        (0.6, 1.6, (2.4, 2.45), (2.4, 1.85)),
        (0.8, 1.2, (2.1, 2.7), (0.9, 1.1)),
        (0.8, 1.6, (2.4, 2.7), (2.4, 1.1)),
    ],
)
def test_contributions_of_the_worked_example(low: float, high: float, value: tuple, gradient: tuple) -> None:
    np.testing.assert_allclose(contributions(RHO, A, ONES, low, high), value, rtol=1e-6)
    np.testing.assert_allclose(contributions(RHO, A, ONES, low, high, "gradient"), gradient, rtol=1e-6)


def search(target: float, order: str = "low_first", criterion: str = "ratio", statistic: str = "value") -> list[float]:
    bounds = search_bounds(RHO, A, ONES, target, (0.6, 0.8, 0.05), (1.2, 2.0, 0.05), order, criterion, statistic)
    return [round(float(x), 5) for x in bounds]


def test_searches_of_the_worked_example() -> None:
    assert search(0.85) == [0.6, 1.2], "enough at the start"
    assert search(1.0) == [0.8, 2.0], "out of reach: the last bounds"
    assert search(0.46, "high_first", "share") == [0.6, 1.2]
    assert search(0.48, "high_first", "share") == [0.6, 1.4], "2.3 / 4.75 is the first share above 0.48"
    assert search(0.9, statistic="gradient") == [0.8, 1.5], "the good token at 1.5 has a gradient again"


def test_numbers_may_be_traced_and_nothing_may_count() -> None:
    def bounds(target: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return search_bounds(RHO, A, ONES, target, (0.6, 0.8, step), (1.2, 2.0, step), "low_first", "ratio")

    low, high = jax.vmap(bounds)(jnp.array([0.85, 1.0]), jnp.array([0.05, 0.1]))
    np.testing.assert_allclose(low, [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(high, [1.2, 2.0], rtol=1e-6)
    low, high = search_bounds(RHO, A, 0 * ONES, 0.5, (0.6, 0.8, 0.05), (1.2, 2.0, 0.05))
    assert (float(low), float(high)) == pytest.approx((0.6, 1.2)), "nothing counts: 0 >= 0 is enough"
    with pytest.raises(InputError, match="unknown order"):
        bapo_adaptive_clip(order="both")
