"""Losses between samples of a prompt, against their worked examples and loops in double precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, outputs_of, prepared, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.online_preferences.trpa import trpa
from jaxrl_llm.algorithms.preferences.drpo_decoupled_reward import drpo_decoupled_reward
from jaxrl_llm.core.trajectory import SHARED, Trajectories, map_rows, with_totals

pytestmark = pytest.mark.heavy

BATCH, LOGP = random_batch(1)
X = arrays(BATCH)


def row_mean(values: np.ndarray) -> np.ndarray:
    return (values * X.mask).sum(1) / X.mask.sum(1)


def in_halves(algorithm: object, batch: Trajectories, logp: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and gradient from slices of rows that split the groups."""
    ready = algorithm.objective.refreshed(outputs_of(logp), with_totals(prepared(algorithm, batch)))  # type: ignore
    shared, total, gradient = {name: getattr(ready, name) for name in SHARED}, 0.0, np.zeros(logp.shape)
    for first in (0, 1):
        rows = np.arange(first, len(logp), 2)
        part = map_rows(lambda x, rows=rows: x[rows], ready).replace(**shared)
        value, by = jax.value_and_grad(lambda x, part=part: algorithm.objective.function(outputs_of(x), part)[0])(  # type: ignore
            jnp.asarray(logp[rows], jnp.float32)
        )
        total, gradient[rows] = total + float(value), by
    return total, gradient


def test_trpa_worked_example() -> None:
    h = np.array([0.10, -0.05, 0.02, 0.0])[:, None]
    batch = batch_of(np.ones((4, 1)), np.array([1.0, 0.4, 1, 0]), h, reference_logp=np.zeros((4, 1)))
    found = learn(trpa(), batch, h)  # on policy, so that the trust region adds nothing
    assert found.loss == pytest.approx(0.685207, abs=1e-6)
    h = np.array([[0.1], [-0.2]])
    alone = learn(trpa(), batch_of(np.ones((2, 1)), np.ones(2), h, reference_logp=np.zeros((2, 1))), h)
    assert alone.loss == pytest.approx(0.721268, abs=1e-6)
    l = np.array([[0.2, -0.1, 0.05]])
    batch = batch_of(np.ones((1, 3)), np.ones(1), np.zeros((1, 3)), reference_logp=l)
    assert learn(trpa(trust=1.0), batch, l).loss - np.log(2) == pytest.approx(0.008377, abs=1e-6)


def test_trpa_by_loop_however_it_is_split() -> None:
    reward = np.where(X.group == 1, X.reward * 0.5 + 0.5 * (np.arange(len(X.reward)) % 2), X.reward)
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32))
    method = trpa(beta=0.8, trust=0.3)

    def loss(logp: np.ndarray) -> float:
        h, terms = row_mean(logp - X.reference), []
        for i in range(len(h)):
            for j in range(len(h)):
                if X.group[i] == X.group[j] and reward[i] > reward[j]:
                    c = 2.5 if reward[i] >= 1 else 1.0
                    terms.append(np.log1p(np.exp(-c * 0.8 * (h[i] - h[j]))))
        d = X.behaviour - logp
        return np.mean(terms) + 0.3 * ((np.exp(d) - 1 - d) * X.mask).sum() / X.mask.sum()

    found = learn(method, batch, LOGP)
    assert_matches_loop(found, loss, LOGP)
    value, gradient = in_halves(method, batch, LOGP)
    assert value == pytest.approx(found.loss, abs=1e-6)
    np.testing.assert_allclose(gradient, found.gradient, rtol=1e-4, atol=1e-6)


def test_drpo_worked_example() -> None:
    """One token each, so that the mean log-probability is its own; lengths are set by masks of other rows' width."""
    lengths, s = np.array([20, 80, 50, 60]), np.array([-0.5, -0.8, -0.6, -1.0])
    mask = np.arange(80) < lengths[:, None]
    logp = s[:, None] * mask
    batch = batch_of(mask, np.array([1.0, 1, 0, 0]), logp)
    found = learn(drpo_decoupled_reward(max_length=100), batch, logp)  # on policy: no guard
    assert found.loss == pytest.approx(-0.297258, abs=1.5e-6)
    by_score = -found.gradient.sum(1)
    np.testing.assert_allclose(by_score, [0.997527, 0.002473, -0.509999, -0.490001], atol=2e-6)


@pytest.mark.parametrize("estimator", ["kl", "low_var_kl"])
def test_drpo_by_loop_however_it_is_split(estimator: str) -> None:
    method = drpo_decoupled_reward(0.5, 0.7, kl_limit=1e-3, kl_coefficient=5.0, kl_estimator=estimator, max_length=6)
    reward = np.where(X.group == 2, 1.0, X.reward)  # a prompt without wrong answers still counts
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32))
    logp = LOGP - 0.1 * X.mask  # so that the policy is far enough for the guard

    def divergence(logp: np.ndarray) -> float:
        d = X.behaviour - logp
        return ((d if estimator == "kl" else np.exp(-d) - 1 + d) * X.mask).sum() / X.mask.sum()

    guard = 5.0 * max(divergence(logp) - 1e-3, 0)
    assert guard > 0

    def loss(logp: np.ndarray) -> float:
        s, total = row_mean(logp), 0.0
        for g in (0, 1):
            right, wrong = (np.flatnonzero((X.group == g) & (reward == r)) for r in (1, 0))
            w = np.exp((1 - X.mask.sum(1)[right] / 6) / 0.5)
            total += (w / w.sum() * s[right]).sum() - 0.7 * np.log(np.exp(s[wrong] / 0.7).mean())
        return -total / 3 + guard * divergence(logp)

    found = learn(method, batch, logp)
    assert_matches_loop(found, loss, logp)
    value, gradient = in_halves(method, batch, logp)
    assert value == pytest.approx(found.loss, abs=1e-6)
    np.testing.assert_allclose(gradient, found.gradient, rtol=1e-4, atol=1e-6)


def test_pairs_of_two_levels_are_dpo() -> None:
    """With one right and one wrong answer: -log sigmoid(beta (h_w - h_l))."""
    batch = batch_of(np.ones((2, 2)), [1.0, 0], LOGP[:2, :2], reference_logp=X.reference[:2, :2])
    found = learn(trpa(anisotropy=1.0, trust=0.0), batch, LOGP[:2, :2])

    def dpo(logp: np.ndarray) -> float:
        h = (logp - X.reference[:2, :2]).mean(1)
        return float(np.log1p(np.exp(-0.1 * (h[0] - h[1]))))

    assert found.loss == pytest.approx(dpo(LOGP[:2, :2]), abs=1e-6)
    np.testing.assert_allclose(found.gradient, finite_differences(dpo, LOGP[:2, :2]), atol=1e-6)
