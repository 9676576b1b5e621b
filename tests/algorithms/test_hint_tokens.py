"""ADHint against a loop in double precision, and in the limits in which it is GRPO."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.guidance.adhint import adhint, failure_weights
from jaxrl_llm.utils.errors import InputError

BATCH, LOGP = random_batch(3, (5, 4, 4), length=7)
X = arrays(BATCH)
HINTS = np.array([0, 0, 0, 2, 3, 0, 0, 1, 1, 0, 0, 0, 0])  # the last group has none
REWARD = np.array([0, 0.5, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0])
HINTED = BATCH.replace(reward=jnp.asarray(REWARD, jnp.float32)).with_info(hint_tokens=jnp.asarray(HINTS, jnp.float32))
NOW = X.entropy * np.random.default_rng(4).uniform(0.5, 1.5, X.mask.shape)  # of the current policy


def scores(r: np.ndarray) -> np.ndarray:
    if r.size < 2 or np.ptp(r) == 0:
        return np.zeros(len(r))
    return (r - r.mean()) / (r.std(ddof=1) + 1e-6)


def credit(compared: str, balance: bool) -> np.ndarray:
    A, hinted = np.zeros(len(REWARD)), HINTS > 0
    for g in set(X.group):
        mine = X.group == g
        kinds = [mine & ~hinted, mine & hinted]
        for kind in kinds if compared == "kind" else [mine]:
            A[kind] = scores(REWARD[kind])
        if not balance or not all(kind.any() for kind in kinds):
            continue
        plain, helped = (1 - REWARD[kind].mean() for kind in kinds)
        rho = plain / (plain + helped + 1e-6)
        factor = np.array([rho if (A[i] < 0 if hinted[i] else A[i] > 0) else 1 - rho for i in np.flatnonzero(mine)])
        A[mine] *= factor / factor.mean()
    return A


@pytest.mark.heavy
@pytest.mark.parametrize(("compared", "balance"), [("kind", True), ("group", True), ("kind", False)])
def test_adhint_is_its_loop(compared: Any, balance: bool) -> None:
    found = learn(adhint(compared=compared, balance=balance), HINTED, LOGP, NOW)
    A, weight = credit(compared, balance), np.ones(X.mask.shape)
    behaviour = X.behaviour.copy()
    for i, hints in enumerate(HINTS):
        places = np.flatnonzero(X.mask[i])
        own = NOW[i, places[hints:]].mean() if hints < len(places) else None
        for t in places[:hints]:
            behaviour[i, t] = X.old[i, t]
            weight[i, t] = 0 if A[i] < 0 else 1 if own is None else np.exp(-abs(NOW[i, t] - own) / own)
    assert any((A[i] < 0) and HINTS[i] for i in range(len(A)))
    assert any((A[i] > 0) and HINTS[i] for i in range(len(A)))

    def loss(logp: np.ndarray) -> float:
        total = 0.0
        for i, t in X.tokens():
            rho = np.exp(logp[i, t] - behaviour[i, t])
            total -= weight[i, t] * min(rho * A[i], min(max(rho, 0.8), 1.2) * A[i])
        return total / X.mask.sum()

    assert_matches_loop(found, loss, LOGP)
    assert not found.by_entropy.any(), "the weights of hints are not differentiated"
    in_hint = X.mask & (np.cumsum(X.mask, axis=1) <= HINTS[:, None])
    assert found.metrics["hint/share"] == pytest.approx(in_hint.sum() / X.mask.sum(), rel=1e-6)
    assert found.metrics["hint/weight"] == pytest.approx((weight * in_hint).sum() / X.mask.sum(), rel=1e-5)


def test_without_hints_it_is_grpo() -> None:
    found = learn(adhint(), BATCH, LOGP, NOW)
    ordinary = learn(grpo(kl_coefficient=0, average="token"), BATCH, LOGP, NOW)
    np.testing.assert_allclose(found.gradient, ordinary.gradient, rtol=3e-7, atol=0)  # another program: last digits
    np.testing.assert_allclose(found.loss, ordinary.loss, rtol=1e-5)


def test_kinds_that_fail_alike_are_weighted_alike() -> None:
    """D_N = D_H: rho = 1/2 for all; and the mean weight of a group is 1, however the kinds fail."""
    same = HINTED.replace(
        reward=jnp.asarray([0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0], jnp.float32),
        advantages=jnp.asarray(np.where(X.mask, np.sign(np.arange(len(HINTS)) - 5.5)[:, None], 0), jnp.float32),
    )
    np.testing.assert_allclose(failure_weights(same)[5:9], 1, rtol=1e-5)
    np.testing.assert_array_equal(failure_weights(same)[9:], 1)
    assert float(jnp.mean(failure_weights(same)[:5])) == pytest.approx(1, rel=1e-6)
    solved = same.replace(reward=jnp.asarray(np.where(HINTS > 0, 1.0, 0.0), jnp.float32))
    assert np.isfinite(failure_weights(solved)).all(), "D_N = 1, D_H = 0"


def test_another_comparison_is_refused() -> None:
    with pytest.raises(InputError, match="unknown compared of adhint 'row'"):
        adhint(compared="row")  # type: ignore[arg-type]
