"""Weights of the score function on plain numbers, and averages of groups of tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.credit.degrpo import actions_after, first_actions
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.objectives.averages import average_by_name, token_groups
from jaxrl_llm.objectives.surrogates import geometric_clip, one_sided_log, soft_gated_value
from jaxrl_llm.objectives.weights import (
    bernoulli_kl,
    by_sign,
    capped,
    clipped,
    gamma_weight,
    product,
    small_moves,
    within,
)
from jaxrl_llm.utils.errors import InputError

MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
VALUES = np.arange(1.0, 13).reshape(4, 3)


def batch_of(mask: Any = MASK, group: Any = (0, 0, 0, 1), **fields: Any) -> Trajectories:
    mask = jnp.asarray(mask, bool)
    zeros, row = jnp.zeros(mask.shape, jnp.int32), jnp.asarray(group, jnp.int32)
    batch = Trajectories(zeros, mask, mask, jnp.zeros(mask.shape), zeros, zeros, row, row, row > 9)
    return batch.replace(**{name: jnp.asarray(x, jnp.float32) for name, x in fields.items()})


def averaged(name: Any, batch: Trajectories, values: Any = VALUES, length: float | None = None) -> float:
    average = average_by_name(name, length) if isinstance(name, str) else name
    nothing = PolicyOutputs(jnp.zeros(batch.tokens.shape), jnp.zeros(batch.tokens.shape))
    batch = average.refresh(nothing, batch) if average.refresh else batch
    return float(average(jnp.asarray(values, jnp.float32), batch))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sequence", (2 + 4.5 + 7 + 11) / 4),
        ("token", (6 + 9 + 7 + 33) / 9),
        ("prompt", (22 / 6 + 11) / 2),
        ("sum", (6 + 9 + 7 + 33) / 4),
        ("constant", (6 + 9 + 7 + 33) / 12),
        ("slice", (6 + 9 + 7 + 33) / 9),
    ],
)
def test_averages_by_name(name: str, expected: float) -> None:
    assert averaged(name, batch_of()) == pytest.approx(expected, rel=1e-6)
    assert averaged(name, batch_of(np.zeros((4, 3)))) == 0
    assert averaged(name, batch_of(weights=np.zeros((4, 3)))) == 0


def test_averages_with_dropped_rows_and_a_given_length() -> None:
    weights = np.array([[1.0], [1], [1], [0]]) * np.ones((1, 3))
    assert averaged("prompt", batch_of(weights=weights)) == pytest.approx(22 / 6)
    assert averaged("constant", batch_of(weights=weights), length=10) == pytest.approx(22 / 40)
    with pytest.raises(InputError, match="average"):
        average_by_name("median")
    with pytest.raises(InputError, match="length"):
        average_by_name("constant", 0.0)


@pytest.mark.parametrize("left", [0, 2])
def test_groups_of_tokens(left: int) -> None:
    mask, values = (np.pad(x, ((0, 0), (left, 1))) for x in (MASK, VALUES))
    groups = {"first": (0.5, first_actions()), "later": (2.0, actions_after())}
    first, later = (1 + 4 + 7 + 10) / 4, [2.5, 5, 0, 11.5]
    by_sequence = 0.5 * first + 2 * sum(later) / 4
    assert averaged(token_groups(groups), batch_of(mask), values) == pytest.approx(by_sequence)
    by_token = 0.5 * first + 2 * (2 + 3 + 5 + 11 + 12) / 5
    assert averaged(token_groups(groups, over="token"), batch_of(mask), values) == pytest.approx(by_token)
    assert averaged(token_groups(groups, over="token"), batch_of(mask & False), values) == 0


def test_gamma_weights() -> None:
    W = jnp.array([0.25, 0.5, 1, 1.5, 2, 4])
    positive, negative = gamma_weight(W, 2.0, 3.0), gamma_weight(W, 3.0, 2.0)
    np.testing.assert_allclose(positive, [0.592983, 1.120422, 1, 0.502043, 0.199148, 0.001975], atol=1e-6)
    np.testing.assert_allclose(negative, [0.070026, 0.339785, 1, 1.241593, 1.082682, 0.158640], atol=1.5e-6)
    assert np.isfinite(gamma_weight(jnp.array([0.0, 1e17]), 2.0, 3.0)).all()


def test_moves_of_probability() -> None:
    p, p0 = jnp.array([0.001, 0.95, 0.3, 0.6, 0.8]), jnp.array([1e-5, 0.75, 0.5, 0.4, 0.99])
    A = jnp.array([1, 1, -1, -1, -1])
    assert small_moves(p, p0, A, 0.15, 0.15).astype(int).tolist() == [1, 0, 0, 1, 0]
    assert small_moves(p, p0, A, 0.05, 0.05, "kl").astype(int).tolist() == [1, 0, 0, 1, 0]
    np.testing.assert_allclose(bernoulli_kl(p0, p), [0.000944, 0.225068, 0.087177, 0.081093, 0.181005], atol=1e-6)
    extreme = bernoulli_kl(jnp.array([0.0, 1, 0, 1]), jnp.array([0.0, 1, 1, 0]))
    assert np.isfinite(extreme).all()


def test_weights_by_the_sign_of_the_advantage() -> None:
    batch = batch_of(np.ones((1, 4)), (0,), advantages=[[1, 1, -1, -1]])
    ratio = jnp.array([[0.5, 15, 0.5, 15]])
    found = by_sign(clipped(0.2, 10), clipped(1, 100))(ratio, batch)
    np.testing.assert_allclose(found, [[0.8, 11, 0.5, 15]])
    np.testing.assert_allclose(product(within(0.2, 0.2), capped(5.0))(ratio, batch), [[0.5, 0, 0, 5]])


def test_soft_gate() -> None:
    ratio = jnp.array([0.5, 1, 1.5, 3])
    np.testing.assert_allclose(
        soft_gated_value(ratio, jnp.ones(4), 1.0, 1.05), [1.510163, 2, 2.489837, 3.523188], atol=1e-6
    )
    np.testing.assert_allclose(
        soft_gated_value(ratio, -jnp.ones(4), 1.0, 1.05), [-1.415938, -1.904762, -2.393585, -3.393917], atol=1e-6
    )
    slope = jax.vmap(jax.grad(lambda r: soft_gated_value(r, jnp.float32(1), 1.0, 1.05)))(ratio)
    np.testing.assert_allclose(slope, [0.940015, 1, 0.940015, 0.419974], atol=1e-6)
    far = jax.grad(lambda r: soft_gated_value(r, jnp.float32(-1), 1.0, 1.05))(jnp.float32(np.exp(20.0)))
    assert float(far) == 0


def test_log_ratios_bounded_before_the_mean() -> None:
    d = jnp.array([[0.1, -0.3, 0.5], [0.1, -0.5, 0], [0.05, 0, 0], [0.3, -0.05, -0.5]])
    A = jnp.array([[1.0], [-1], [-1], [1]]) * MASK
    expected = [[0.1, -0.3, 0.4], [0.1, -0.4, 0], [0.05, 0, 0], [0.3, -0.05, -0.5]]
    np.testing.assert_allclose(one_sided_log(d, A, 0.4, 0.4), expected, rtol=1e-6)
    value, _ = geometric_clip()(jnp.exp(d), PolicyOutputs(d, d), batch_of(advantages=A))
    g = [1.068939, 0.860708, 1.051271, 0.920044]
    np.testing.assert_allclose(value[:, 0], np.array(g) * [1, -1, -1, 1], atol=1e-6)
    np.testing.assert_allclose(value[0], [1.068939] * 3, atol=1e-6)
