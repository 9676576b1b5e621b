"""Score functions with masks and regressions, against their worked examples and loops in double precision."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.score_function.asymre import asymre
from jaxrl_llm.algorithms.score_function.opmd import opmd
from jaxrl_llm.algorithms.score_function.rec_off_policy_reinforce import rec_off_policy_reinforce
from jaxrl_llm.algorithms.score_function.rover import rover

pytestmark = pytest.mark.heavy

BATCH, LOGP = random_batch(1)
X = arrays(BATCH)
CARD = batch_of(np.ones((4, 1)), np.array([1.0, 0, 0, 1]), -1.5 * np.ones((4, 1)))
CARD_LOGP = np.array([-1.2, -1.2, -2.7, -2.7])[:, None]
rec = rec_off_policy_reinforce


@pytest.mark.parametrize(
    ("method", "loss", "gradient"),
    [
        (rec(clip="none"), 0.0, [-0.125, 0.125, 0.125, -0.125]),
        (rec(), 0.1875, None),
        (rec(weight="importance"), -0.100826, [0, 0.168732, 0, -0.037649]),
        (rec(clip="ring"), 0.3375, None),
        (rec(clip="two-side"), 0.0, [0, 0, 0, 0]),
        (asymre(), 0.195, [-0.15, 0.1, 0.1, -0.15]),
        (opmd(), 0.0765, [-0.11, 0.14, 0.065, -0.185]),
        (rec(clip="none", weight="advantage"), 0.508068, None),
    ],
)
def test_rec_worked_example(method: Any, loss: float, gradient: list[float] | None) -> None:
    found = learn(method, CARD, CARD_LOGP)
    assert found.loss == pytest.approx(loss, abs=1e-6)
    if gradient is not None:
        np.testing.assert_allclose(found.gradient[:, 0], gradient, atol=1e-6)


@pytest.mark.parametrize(("weight", "regulariser"), [("importance", "k2"), ("advantage", "forward-kl")])
def test_rec_by_loop(weight: str, regulariser: str) -> None:
    numbers: Any = {"clip_low": 0.1, "clip_high": 0.1, "far_low": 0.15, "far_high": 0.2}
    method = rec("ring", weight, regulariser, scale="std", temperature=2.0, **numbers)
    A, rho = X.advantages("std", 0), np.exp(LOGP - X.behaviour)
    masks = []

    def loss(logp: np.ndarray) -> float:
        total = 0.0
        for i, t in X.tokens():
            a, r = A[i, 0], rho[i, t]
            kept = 0.9 <= r <= 1.1 or (a >= 0 and r <= 0.85) or (a <= 0 and r >= 1.2)
            masks.append(kept)
            w = r if weight == "importance" else np.exp(a / 2)
            total -= kept * w * a * logp[i, t]
            total += 0.1 * ((logp[i, t] - X.behaviour[i, t]) ** 2 if regulariser == "k2" else -logp[i, t])
        return total / X.mask.sum()

    assert_matches_loop(learn(method, BATCH, LOGP), loss, LOGP)
    assert 0 < np.mean(masks) < 1


def test_dropping_bad_samples_for_balance() -> None:
    batch = batch_of(np.ones((4, 1)), np.array([1.0, 0, 0, 0]), -np.arange(1.0, 5)[:, None])
    method, state, kept = rec(drop="balance"), None, set()
    for _ in range(6):
        found = learn(method, batch, CARD_LOGP, state=state)
        A, state = np.asarray(found.batch.advantages)[:, 0], found.state
        assert sorted(A) == [-0.5, 0, 0, 0.5]
        assert A[0] == 0.5
        kept.add(int(np.argmin(A)))
    assert len(kept) > 1, "chance"


def test_members_of_rec_at_their_limits() -> None:
    clipped = learn(grpo(kl_coefficient=0, ddof=0, scale="none"), CARD, CARD_LOGP)
    np.testing.assert_allclose(learn(rec(weight="importance"), CARD, CARD_LOGP).gradient, clipped.gradient, atol=1e-7)
    plain = learn(rec(clip="none"), BATCH, LOGP).gradient
    for member in (opmd(coefficient=0.0), asymre(coefficient=0.0)):
        np.testing.assert_allclose(learn(member, BATCH, LOGP).gradient, plain, atol=1e-7)
    on_policy = learn(opmd(), BATCH, X.behaviour).gradient
    np.testing.assert_allclose(on_policy, plain, atol=1e-7)


def test_rover_worked_example() -> None:
    old, new = np.array([[1, 0, -1], [0.5, 0.5, 0]]), np.array([[1.2, 0, -1], [0.7, 0.4, 0]])
    old, new = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (old, new))
    acts = np.array([0, 1])
    batch = batch_of(np.ones((2, 2)), np.array([1.0, 0]), np.tile(old[[0, 1], acts], (2, 1)))
    batch = batch.with_info(mean_logp=jnp.asarray(np.tile(old.mean(1), (2, 1)), jnp.float32))
    logp = np.tile(new[[0, 1], acts], (2, 1))
    # The worked example has one response with r_c = 0.5; the second row is a copy with r_c = -0.5, ignored here.
    batch = batch.replace(weights=jnp.asarray([[1.0, 1.0], [0.0, 0.0]]))
    found = learn(rover(), batch, logp, mean_logp=np.tile(new.mean(1), (2, 1)).astype(np.float32))
    assert found.loss == pytest.approx(0.299145, abs=1e-6)
    np.testing.assert_allclose(found.gradient[0], [-0.423436, -0.647296], atol=1e-6)


def test_rover_by_loop_with_other_tokens_between() -> None:
    random = np.random.default_rng(0)
    mask = X.mask.copy()
    mask[:, 1] = False
    batch = batch_of(mask, X.reward, X.behaviour, X.group)
    old, new = (-random.uniform(3, 4, mask.shape) for _ in range(2))
    batch = batch.with_info(mean_logp=jnp.asarray(old, jnp.float32))
    found = learn(rover(ratio_scale=0.8, next_scale=0.5), batch, LOGP, mean_logp=new.astype(np.float32))
    A = X.advantages("none")

    def loss(logp: np.ndarray) -> float:
        total = 0.0
        for i in range(len(mask)):
            acts = np.flatnonzero(mask[i])
            for k, t in enumerate(acts):
                after = 0.0 if k + 1 == len(acts) else 0.8 * (new[i, acts[k + 1]] - old[i, acts[k + 1]])
                total += (0.8 * (logp[i, t] - X.behaviour[i, t]) - A[i, 0] - 0.5 * after) ** 2
        return total / mask.sum()

    assert_matches_loop(found, loss, LOGP)
    on_policy = learn(rover(), batch, X.behaviour, mean_logp=old.astype(np.float32)).gradient
    np.testing.assert_allclose(on_policy, -2 * A * mask / mask.sum(), atol=1e-6)
