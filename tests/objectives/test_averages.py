"""Averages against loops: weights, empty rows, and masked tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, map_rows, with_totals
from jaxrl_llm.objectives import (
    clip,
    entropy,
    entropy_corridor,
    imitation,
    kl,
    likelihood_preserving,
    policy_gradient,
    ratio_variance,
    sequence_mean,
    token_mean,
    token_ratio,
)
from jaxrl_llm.objectives.averages import Average
from jaxrl_llm.utils.errors import InputError

N, L = 4, 3
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
TOKEN_LOSSES = np.array(
    [[-0.957104, -0.641566, -1.039229], [0.957104, 0.692819, 0], [0.910426, 0, 0], [-1.039229, -0.823787, -0.525270]]
)


def batch_of(mask: Any, weights: Any = None) -> Trajectories:
    mask = jnp.asarray(mask, bool)
    zeros, row = jnp.zeros(mask.shape, jnp.int32), jnp.zeros(mask.shape[0], jnp.int32)
    weights = None if weights is None else jnp.asarray(weights, jnp.float32)
    return Trajectories(
        zeros, zeros == 0, mask, jnp.zeros(mask.shape), zeros, zeros, row, row, row > 0, weights=weights
    )


def token_mean_by_loop(values: np.ndarray, mask: np.ndarray, weights: np.ndarray) -> float:
    total = count = 0.0
    for at in np.ndindex(values.shape):
        if mask[at] and weights[at]:
            total, count = total + values[at] * weights[at], count + weights[at]
    return total / count if count else 0.0


def sequence_mean_by_loop(values: np.ndarray, mask: np.ndarray, weights: np.ndarray) -> float:
    means = []
    for v, m, w in zip(values, mask, weights, strict=True):
        length = sum(w[m])
        if length:
            means.append(sum(x * y for x, y, real in zip(v, w, m, strict=True) if real and y) / length)
    return sum(means) / len(means) if means else 0.0


LOOPS: list[tuple[Callable[[], Average], Callable[..., float]]] = [
    (token_mean, token_mean_by_loop),
    (sequence_mean, sequence_mean_by_loop),
]
both = pytest.mark.parametrize(("average", "loop"), LOOPS)


def test_four_samples_by_hand() -> None:
    values, batch = jnp.asarray(TOKEN_LOSSES), batch_of(MASK)
    assert float(sequence_mean()(values, batch)) == pytest.approx(0.014998, abs=1.5e-6)
    assert float(token_mean()(values, batch)) == pytest.approx(-0.273982, abs=1.5e-6)


@both
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), present=st.floats(0, 1), weighted=st.booleans())
def test_it_is_the_loop(average: Any, loop: Any, seed: int, present: float, weighted: bool) -> None:
    random = np.random.default_rng(seed)
    mask, values = random.random((N, L)) < present, random.normal(size=(N, L))
    weights = random.choice([0.0, 0.5, 1.0, 2.0], (N, L)) if weighted else np.ones((N, L))
    found = average()(jnp.asarray(values, jnp.float32), batch_of(mask, weights))
    assert float(found) == pytest.approx(loop(values, mask, weights), rel=1e-5, abs=1e-6)


@both
def test_masked_values_do_not_leak(average: Any, loop: Any) -> None:
    weights = np.ones((N, L))
    weights[0, 1] = 0
    hole = ~MASK | (weights == 0)
    garbage = np.where(hole, np.resize([np.nan, np.inf, -np.inf], (N, L)), TOKEN_LOSSES)
    garbage_weights = np.where(MASK, weights, np.nan)
    batch = batch_of(MASK, garbage_weights)
    value, gradient = jax.value_and_grad(average())(jnp.asarray(garbage, jnp.float32), batch)
    clean, clean_gradient = jax.value_and_grad(average())(
        jnp.asarray(TOKEN_LOSSES, jnp.float32), batch_of(MASK, weights)
    )
    assert float(value) == float(clean) == pytest.approx(loop(TOKEN_LOSSES, MASK, weights), rel=1e-6)
    np.testing.assert_array_equal(gradient, clean_gradient)
    assert (np.asarray(gradient)[hole] == 0).all()
    assert (np.asarray(gradient)[~hole] > 0).all()


@both
@pytest.mark.parametrize("shape", [(3, 4), (3, 0)])
def test_nothing_to_average_is_zero(average: Any, loop: Any, shape: tuple[int, int]) -> None:
    value, gradient = jax.value_and_grad(average())(jnp.full(shape, jnp.nan), batch_of(np.zeros(shape)))
    assert float(value) == 0
    assert (np.asarray(gradient) == 0).all()


def test_a_row_without_actions_counts_as_no_sequence() -> None:
    values, mask = jnp.ones((3, 2)), np.array([[1, 1], [0, 0], [1, 0]])
    assert float(sequence_mean()(values, batch_of(mask))) == 1


@both
def test_a_common_factor_of_the_weights_cancels(average: Any, loop: Any) -> None:
    values, weights = jnp.asarray(TOKEN_LOSSES), np.arange(1.0, 13).reshape(N, L)
    one, many = average()(values, batch_of(MASK, weights)), average()(values, batch_of(MASK, 1e-3 * weights))
    assert float(one) == pytest.approx(float(many), rel=1e-5)
    assert float(one) == pytest.approx(loop(TOKEN_LOSSES, MASK, weights), rel=1e-5)


@both
def test_slices_add_up_to_the_whole(average: Any, loop: Any) -> None:
    values, batch = jnp.asarray(TOKEN_LOSSES), with_totals(batch_of(MASK))
    parts = [average()(values[i : i + 1], map_rows(lambda x, i=i: x[i : i + 1], batch)) for i in range(N)]
    assert float(sum(parts)) == pytest.approx(float(average()(values, batch)), rel=1e-6)


def test_an_average_brings_what_it_needs_to_every_objective() -> None:
    """Needs and refreshes of an average need not be passed to the objective as well."""
    seen = Average(lambda x, b: b.controls["seen"] * jnp.sum(x), frozenset({"values"}), see)
    batch = batch_of(MASK).replace(advantages=jnp.asarray(MASK, jnp.float32), reference_logp=jnp.zeros((N, L)))
    batch = batch.replace(old_logp=jnp.zeros((N, L)))
    outputs = PolicyOutputs(jnp.full((N, L), -0.5), jnp.asarray(TOKEN_LOSSES, jnp.float32))
    for objective in (
        policy_gradient(token_ratio(), clip(), seen), kl(average=seen), entropy(seen), imitation(average=seen),
        ratio_variance(average=seen), entropy_corridor(0.0, 0.1, seen), likelihood_preserving(average=seen),
    ):  # fmt: skip
        assert "values" in objective.needs
        once = float(objective(outputs, batch)[0])
        assert float((objective + 0.0 * entropy())(outputs, batch)[0]) == once != 0
    total = float(np.sum(TOKEN_LOSSES.astype(np.float32)))
    assert float(entropy(seen)(outputs, batch)[0]) == pytest.approx(7 * total, rel=1e-6)


def see(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
    return batch.with_controls(seen=jnp.float32(7))


def test_a_plain_function_is_an_average_and_what_makes_one_is_told_to_be_called() -> None:
    outputs = PolicyOutputs(jnp.zeros((N, L)), jnp.asarray(TOKEN_LOSSES, jnp.float32))
    assert float(entropy(lambda x, b: jnp.sum(x))(outputs, batch_of(MASK))[0]) == pytest.approx(TOKEN_LOSSES.sum())
    for wrong in (kl, entropy):
        with pytest.raises(InputError, match="the average is the function token_mean, which makes one: call it"):
            wrong(average=token_mean)
        with pytest.raises(InputError, match=r"the average is .*, but must be an Average"):
            wrong(average=0.5)
    assert (2 * sequence_mean())(jnp.asarray(TOKEN_LOSSES), batch_of(MASK)) == pytest.approx(2 * 0.014998, abs=3e-6)
    for halved in (sequence_mean() / 2, -(-0.5 * sequence_mean())):
        assert halved(jnp.asarray(TOKEN_LOSSES), batch_of(MASK)) == pytest.approx(0.014998 / 2, abs=2e-6)
    with pytest.raises(InputError, match="the scale of an average is 'a'"):
        "a" * token_mean()
