"""Weighted score functions: worked examples, loops in double precision, and cases in which methods are equal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import LOGP, MASK, OLD, batch_of, gradient_of, loss_of, outputs_of
from ratio_loops import Rows, assert_is_the_loop, case, mean, sequence_mean, token_mean

from jaxrl_llm.algorithms.classic.cispo import cispo
from jaxrl_llm.algorithms.classic.dr_grpo import dr_grpo
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.policy_loss.dispo import dispo
from jaxrl_llm.algorithms.policy_loss.dppo import dppo
from jaxrl_llm.algorithms.policy_loss.sapo_soft_adaptive import sapo_soft_adaptive
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

F1 = batch_of()
RAGGED = case(2)


def weighted_rows(logp: Rows, held: Rows, A: list[float], weight: Any) -> Rows:
    """weight(ratio, probability when drawn, advantage) A log pi of each token."""
    return [
        [weight(np.exp(h - b), np.exp(b), a) * a * x for x, h, b in zip(row, fixed, old, strict=True)]
        for row, fixed, old, a in zip(logp, held, RAGGED.behaviour, A, strict=True)
    ]


@pytest.mark.parametrize(
    ("low", "high", "loss"), [(1.0, 0.28, 0.388431), (1.0, 4.0, 0.449718), (0.2, 0.28, 0.399085), (10.0, 4.0, 0.449718)]
)
def test_cispo_worked_example(low: float, high: float, loss: float) -> None:
    assert loss_of(cispo(low, high), F1) == pytest.approx(loss, abs=1.5e-6)
    w = np.clip(np.exp(LOGP - OLD), 1 - low, 1 + high)
    A = 0.866024 * np.array([1, -1, -1, 1])[:, None]
    np.testing.assert_allclose(gradient_of(cispo(low, high), F1), -(MASK * w * A) / 9, atol=1e-6)


def test_cispo_is_the_loop() -> None:
    def loop(logp: Rows, held: Rows) -> float:
        rows = weighted_rows(logp, held, RAGGED.advantage, lambda r, p0, A: min(max(r, 0.9), 1.1))
        return -token_mean(rows)

    assert_is_the_loop(cispo(0.1, 0.1), RAGGED, loop)


@pytest.mark.parametrize(
    ("A", "loss", "gradient"),
    [(1.0, 5.056572, [-0.2, -0.225, -0.3, -2.75]), (-1.0, -6.575712, [0.125, 0.225, 0.3, 3.75])],
)
def test_dispo_worked_example(A: float, loss: float, gradient: list[float]) -> None:
    logp, ratio = np.log([[0.3, 0.6, 0.4, 0.2]]), np.array([[0.5, 0.9, 1.2, 15]])
    batch = batch_of(np.ones((1, 4)), [1.0], logp - np.log(ratio), advantages=np.full((1, 4), A))

    def value(logp: jax.Array) -> jax.Array:
        return dispo().objective(outputs_of(logp), batch)[0]

    found, slope = jax.value_and_grad(value)(jnp.asarray(logp, jnp.float32))
    assert float(found) == pytest.approx(loss, abs=2e-5)
    np.testing.assert_allclose(slope[0], gradient, rtol=1e-5)


def test_dispo_is_the_loop_over_groups_that_differ() -> None:
    c = case(2)
    c.batch = c.batch.replace(reward=jnp.where(c.batch.group == 2, 1.0, c.batch.reward))

    def weight(r: float, p0: float, A: float) -> float:
        return min(max(r, 0.9), 1.2) if A > 0 else min(max(r, 0.95), 1.1)

    def loop(logp: Rows, held: Rows) -> float:
        return -token_mean(weighted_rows(logp, held, c.advantage, weight)[:7])  # 8, and one without a score

    assert_is_the_loop(dispo(0.1, 0.2, 0.05, 0.1), c, loop)


def test_dispo_with_one_range_is_cispo() -> None:
    both = dispo(positive_low=0.1, positive_high=0.2, negative_low=0.1, negative_high=0.2)
    assert loss_of(both, RAGGED.batch, RAGGED.logp) == pytest.approx(
        loss_of(cispo(0.1, 0.2), RAGGED.batch, RAGGED.logp), rel=1e-6
    )


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_worked_example(divergence: str) -> None:
    p, p0 = np.array([[0.001, 0.95, 0.3, 0.6, 0.8]]), np.array([[1e-5, 0.75, 0.5, 0.4, 0.99]])
    batch = batch_of(np.ones((1, 5)), [1.0], np.log(p0), advantages=np.array([[1.0, 1, -1, -1, -1]]))

    def value(logp: jax.Array) -> jax.Array:
        return 5 * dppo(divergence, max_length=5).objective(outputs_of(logp), batch)[0]

    found, slope = jax.value_and_grad(value)(jnp.asarray(np.log(p), jnp.float32))
    assert float(found) == pytest.approx(138.155106 - 0.766238, rel=1e-5)
    np.testing.assert_allclose(slope[0], [-20, 0, 0, 1.5, 0], rtol=1e-5)


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.03), ("kl", 0.002)])
def test_dppo_is_the_loop(divergence: str, bound: float) -> None:
    masked = []

    def weight(r: float, p0: float, A: float) -> float:
        p = min(r * p0, 1.0)
        kl = p0 * np.log(p0 / p) + (1 - p0) * np.log((1 - p0 + 1e-8) / (1 - p + 1e-8))
        far = abs(p - p0) > bound if divergence == "tv" else kl > bound
        masked.append(far and (p > p0 if A > 0 else p < p0))
        return 0.0 if masked[-1] else min(r, 1.1)

    longest = max(len(row) for row in RAGGED.behaviour)

    def loop(logp: Rows, held: Rows) -> float:
        return -mean([sum(row) / longest for row in weighted_rows(logp, held, RAGGED.centred, weight)])

    assert_is_the_loop(dppo(divergence, bound, bound, cap=1.1), RAGGED, loop)
    assert 0 < sum(masked) < len(masked)


def test_on_policy_dppo_is_the_policy_gradient_of_dr_grpo() -> None:
    at = RAGGED.batch.behaviour_logp
    for divergence in ("tv", "kl"):
        found = gradient_of(dppo(divergence, max_length=8), RAGGED.batch, at)
        np.testing.assert_allclose(found, gradient_of(dr_grpo(max_length=8), RAGGED.batch, at), atol=1e-7)
    with pytest.raises(InputError, match="divergence"):
        dppo("js")


def test_sapo_worked_example() -> None:
    mask = np.array([[1, 1], [1, 0]], bool)
    ratio = np.array([[1.5, 0.5], [3, 1]])
    batch = batch_of(mask, [1.0, 0.0], -2.0 * mask, advantages=np.array([[1.0], [-1.0]]) * mask)
    found, _ = sapo_soft_adaptive().objective(outputs_of(-2.0 * mask + np.log(ratio)), batch)
    assert float(found) == pytest.approx(0.696958, abs=1e-6)


def test_sapo_is_the_loop() -> None:
    def loop(logp: Rows, held: Rows) -> float:
        rows: Rows = []
        for row, old, A in zip(logp, RAGGED.behaviour, RAGGED.advantage, strict=True):
            tau = 2.0 if A > 0 else 3.0
            gates = [4 / tau / (1 + np.exp(-tau * (np.exp(x - b) - 1))) for x, b in zip(row, old, strict=True)]
            rows.append([A * gate for gate in gates])
        return -sequence_mean(rows)

    assert_is_the_loop(sapo_soft_adaptive(2.0, 3.0), RAGGED, loop)
    at = RAGGED.batch.behaviour_logp
    found = gradient_of(sapo_soft_adaptive(), RAGGED.batch, at)
    np.testing.assert_allclose(found, gradient_of(grpo(kl_coefficient=0.0), RAGGED.batch, at), atol=1e-7)
