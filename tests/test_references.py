"""Rules of references: what they start from, and how they move."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.policy_loss.remix import reset_at
from jaxrl_llm.algorithms.regularisation.salsa import soup
from jaxrl_llm.algorithms.regularisation.tscac import mixture
from jaxrl_llm.core.reference import ReferenceRule, another, exponential_average, periodic_reset, weighted_mean
from jaxrl_llm.utils.errors import InputError

numbers = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=6)
few = settings(max_examples=20, deadline=None, derandomize=True, database=None)


def history(rule: ReferenceRule, values: list[float], start: float = 0.5) -> list[float]:
    """The reference after each of the updates that lead to these values of a parameter."""
    reference, out = {"w": jnp.float32(start)}, []
    for number, value in enumerate(values, start=1):
        assert rule.update is not None
        reference = rule.update(reference, {"w": jnp.float32(value)}, jnp.int32(number))
        out.append(float(reference["w"]))
    return out


@few
@given(numbers, st.floats(0, 1))
def test_the_average_is_the_sum_over_the_past(values: list[float], decay: float) -> None:
    n = len(values)
    past = decay**n * 0.5 + sum((1 - decay) * decay ** (n - 1 - i) * value for i, value in enumerate(values))
    np.testing.assert_allclose(history(exponential_average(decay), values)[-1], past, atol=1e-4)


@few
@given(numbers, st.integers(1, 4))
def test_a_reset_takes_the_policy_of_every_so_many_updates(values: list[float], every: int) -> None:
    found = history(periodic_reset(every), values)
    for number, reference in enumerate(found, start=1):
        last = number // every * every
        assert reference == np.float32(values[last - 1] if last else 0.5)


def test_a_reset_at_a_step_happens_once() -> None:
    assert history(reset_at(2), [1.0, 3.0, -2.0, 4.0]) == [0.5, 3.0, 3.0, 3.0]
    assert history(reset_at(0), [1.0, 3.0]) == [0.5, 0.5] == history(reset_at(9), [1.0, 3.0])


def test_limits() -> None:
    values = [1.0, 3.0, -2.0]
    assert history(periodic_reset(1), values) == values == history(exponential_average(0.0), values)
    assert history(exponential_average(1.0), values) == [0.5] * 3
    one, two = {"w": jnp.ones(2, jnp.bfloat16)}, {"w": jnp.zeros(2, jnp.bfloat16)}
    assert jax.tree.all(jax.tree.map(np.array_equal, soup("x", share=1.0).init(one, [two]), one))
    assert weighted_mean([one, two], (0.5, 0.5))["w"].dtype == jnp.bfloat16
    assert another("x").init(one, [two]) is two
    assert another(" x ").models == ("x",)
    assert mixture("x", "y").init(one, [one, two]).shares == (0.5, 0.5)


def test_they_print_as_the_code_that_makes_them() -> None:
    assert repr(soup("a", share=0.25)) == 'soup("a", share=0.25)'
    assert repr(exponential_average(0.9)) == "exponential_average(0.9)"


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match=r"decay of exponential_average is 1\.5"):
        exponential_average(1.5)
    with pytest.raises(InputError, match="every of periodic_reset is 0"):
        periodic_reset(0)
    with pytest.raises(InputError, match="a model of the reference"):
        soup("")
    with pytest.raises(InputError, match="leave out its update"):
        ReferenceRule(update=lambda reference, params, updates: params, models=("a",))
