"""Importance correction: worked examples, loops, tokens excluded from the denominators, and extremes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.policy_loss.vespo import sequence_factor
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.objectives.averages import token_mean
from jaxrl_llm.objectives.off_policy import (
    compounded,
    divergence_rejection,
    divergence_weight,
    importance_correction,
    importance_weight,
    scale_by_info,
)
from jaxrl_llm.utils.errors import InputError

MASK = np.array([[1, 1, 1], [1, 1, 0]], bool)
OLD = np.array([[-1, -0.5, -2], [-0.7, -1.2, 0]])
BEHAVIOUR = np.array([[-1.3, -0.55, -3.2], [-0.6, -0.9, 0]])
X = jnp.asarray(OLD - BEHAVIOUR)
RHO = np.array([[1.349859, 1.051271, 3.320117], [0.904837, 0.740818, 1]])


def weight(**options: Any) -> np.ndarray:
    return np.asarray(importance_weight(X, jnp.asarray(MASK), **options))


def batch_of(**fields: Any) -> Trajectories:
    zeros, row = jnp.zeros(MASK.shape, jnp.int32), jnp.zeros(2, jnp.int32)
    mask = jnp.asarray(MASK)
    given = {"old_logp": OLD, "advantages": np.where(MASK, 2.0, np.nan), **fields}
    batch = Trajectories(zeros, mask, mask, jnp.asarray(BEHAVIOUR, jnp.float32), zeros, zeros, row, row, row > 0)
    return batch.replace(**{name: jnp.asarray(x, jnp.float32) for name, x in given.items()})


def applied(transform: Any, **fields: Any) -> Any:
    return transform.apply(transform.init(), batch_of(**fields))[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"high": 10.0}, RHO),
        ({"high": 2.0}, np.minimum(RHO, 2)),
        ({"mode": "mask", "low": 0.5, "high": 2.0}, RHO * (RHO < 2)),
        ({"mode": "mask", "low": 0.5, "high": 5.0}, RHO),
        ({"mode": "reject", "low": 0.8, "high": 2.0}, [[1, 1, 0], [1, 0, 1]]),
        ({"level": "sequence", "high": 10.0}, [[4.711470] * 3, [0.670320, 0.670320, 1]]),
        ({"level": "sequence", "high": 3.0}, [[3] * 3, [0.670320, 0.670320, 1]]),
        ({"level": "sequence", "mode": "mask", "high": 3.0}, [[0] * 3, [0.670320, 0.670320, 1]]),
        ({"level": "geometric", "high": 10.0}, [[1.676430] * 3, [0.818731, 0.818731, 1]]),
        ({"level": "geometric", "mode": "reject", "low": 0.8, "high": 1.2}, [[0] * 3, [1] * 3]),
    ],
)
def test_weights_of_the_worked_example(options: dict[str, Any], expected: Any) -> None:
    np.testing.assert_allclose(weight(**options), expected, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("summary", ["token", "sum", "mean", "max"])
def test_divergence_rejection_is_the_loop(estimator: str, summary: str) -> None:
    x = np.asarray(X, np.float64)
    found = divergence_weight(X, jnp.asarray(MASK), 0.06, estimator, summary)
    for i in range(2):
        d = [x[i, t] ** 2 / 2 if estimator == "k2" else np.exp(x[i, t]) - 1 - x[i, t] for t in range(3) if MASK[i, t]]
        whole = {"sum": sum(d), "mean": sum(d) / len(d), "max": max(d)}
        expected = [float((v if summary == "token" else whole[summary]) <= 0.06) for v in d]
        assert np.asarray(found)[i][MASK[i]].tolist() == expected
    assert np.asarray(found)[1, 2] == 1


@pytest.mark.parametrize("leave", [False, True])
def test_rejected_tokens_leave_the_count_or_not(leave: bool) -> None:
    ready = applied(importance_correction("token", "mask", 0.5, 2.0, leave_count=leave))
    np.testing.assert_allclose(ready.advantages, 2 * RHO * MASK * (RHO < 2), atol=1e-5)
    assert float(jnp.sum(ready.loss_weights)) == (4 if leave else 5)
    total = 2 * (RHO * MASK * (RHO < 2)).sum()
    assert float(token_mean()(ready.advantages, ready)) == pytest.approx(total / (4 if leave else 5), rel=1e-5)
    again = applied(divergence_rejection(0.06, "k3", "token", leave_count=leave))
    assert float(jnp.sum(again.loss_weights)) == (4 if leave else 5)


def test_normalised_weights_have_mean_one() -> None:
    by_token = applied(importance_correction(normalise="token")).advantages / 2
    assert float(by_token.sum() / 5) == pytest.approx(1)
    by_row = np.asarray(applied(importance_correction(normalise="sequence")).advantages) / 2
    assert (by_row[0].mean() + by_row[1, :2].mean()) / 2 == pytest.approx(1)


def test_the_product_of_token_weights_switches_off_sequences_with_a_rejected_token() -> None:
    found = sequence_factor("truncate", 2.0)(batch_of())
    np.testing.assert_allclose(found, [[1.349859 * 1.051271 * 2] * 3, [0.670320] * 3], rtol=1e-5)
    assert float(sequence_factor("mask", 2.0)(batch_of())[0, 0]) < 1e-7


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
def test_extremes_are_finite(level: str, mode: str) -> None:
    for old in (np.full((2, 3), -1e4), np.full((2, 3), 1e4)):
        transform = importance_correction(level, mode, normalise="token", leave_count=True)
        ready = applied(transform, old_logp=old)
        assert np.isfinite(ready.advantages).all()
        assert np.isfinite(ready.loss_weights).all()


def test_factors_of_the_worked_example_compound() -> None:
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
    x = jnp.array([[0.10, -0.02, 9], [0.3, 0.3, 0.3], [5, 5, 5]])
    first = compounded(jnp.ones(3), x, jnp.asarray(mask))
    np.testing.assert_allclose(first, [1.040811, 1.2, 1], atol=1e-6)
    second = compounded(first, jnp.full((3, 3), 0.05).at[1].set(0.1), jnp.asarray(mask))
    np.testing.assert_allclose(second, [1.094174, 1.2, 1], atol=1e-6)


def test_scaling_by_what_the_batch_knows() -> None:
    batch = batch_of().with_info(factor=jnp.array([0.5, 3.0]))
    found = scale_by_info("factor").apply((), batch)[1].need("advantages")
    np.testing.assert_allclose(found, [[1, 1, 1], [6, 6, 0]])
    assert scale_by_info("other").apply((), batch)[1] is batch


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(InputError, match="level"):
        importance_correction("turn")
    with pytest.raises(InputError, match="mode"):
        importance_correction(mode="drop")
    with pytest.raises(InputError, match="high of importance_correction is 0"):
        importance_correction(high=0.0)
    with pytest.raises(InputError, match="estimator"):
        divergence_rejection(0.1, "k1")
    with pytest.raises(InputError, match="old_logp"):
        importance_correction().apply((), batch_of().replace(old_logp=None))
