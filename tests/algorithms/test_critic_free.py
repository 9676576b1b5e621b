"""Clipped losses without a critic: worked examples, loops in double precision, gradients, and special cases."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    MASK,
    OLD,
    REFERENCE,
    advantages,
    batch_of,
    finite_differences,
    gradient_of,
    loss_of,
    near,
    prepared,
    random_batch,
)  # fmt: skip
from plain_losses import averaged, clipped_loss, on_tokens

from jaxrl_llm.algorithms.classic.reinforce_plus_plus import reinforce_plus_plus
from jaxrl_llm.algorithms.classic.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from jaxrl_llm.algorithms.classic.rloo import rloo
from jaxrl_llm.algorithms.score_function.loop import loop
from jaxrl_llm.algorithms.score_function.spo_single_stream import spo_single_stream
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

F1 = batch_of(reference_logp=REFERENCE)
BATCH, NEAR = random_batch(0)
MASKS = np.asarray(BATCH.action_mask)
R, GROUP = np.asarray(BATCH.reward, np.float64), np.asarray(BATCH.group)
BEHAVIOUR, REF = (np.asarray(x, np.float64) for x in (BATCH.behaviour_logp, BATCH.reference_logp))
N = len(R)


def check(algorithm: Algorithm, A: Any, loss: Any, batch: Any = BATCH) -> None:
    near(advantages(algorithm, batch), A, 1e-5)
    assert loss_of(algorithm, batch, NEAR) == pytest.approx(loss(NEAR), rel=1e-5, abs=1e-5)
    near(gradient_of(algorithm, batch, NEAR), finite_differences(loss, NEAR), 1e-5)


def test_reinforce_plus_plus_worked_example() -> None:
    A = [[0.669742, 0.690244, 0.710747], [-1.298480, -1.318982, 0], [-1.380489, 0, 0], [0.649240, 0.628737, 0.649240]]
    near(advantages(reinforce_plus_plus(kl_coefficient=0.1), F1), A)


def test_reinforce_plus_plus_is_the_loop() -> None:
    G = np.zeros(MASKS.shape)
    for n in range(N):
        T = MASKS[n].sum()
        for t in reversed(range(T)):
            earned = -0.3 * (BEHAVIOUR - REF)[n, t] + (R[n] if t == T - 1 else 0.0)
            G[n, t] = earned + (0.9 * G[n, t + 1] if t < T - 1 else 0.0)
    A = (G - G[MASKS].mean()) / np.sqrt(G[MASKS].var(ddof=1) + 1e-8) * MASKS
    algorithm = reinforce_plus_plus(0.3, 0.9, clip_low=0.1, clip_high=0.15)
    check(algorithm, A, lambda x: clipped_loss(A, x, BEHAVIOUR, MASKS, 0.1, 0.15, "token"))


def test_reinforce_plus_plus_passes_the_reward_through_the_environments_tokens() -> None:
    mask = np.array([[1, 0, 1, 0], [1, 1, 0, 0]])
    A = advantages(reinforce_plus_plus(0.0), batch_of(mask, [1.0, 0], -1.0 * mask, [0, 1]))
    near(A, np.array([[1, 0, 1, 0], [-1, -1, 0, 0]]) * 0.75**0.5)


def test_reinforce_plus_plus_baseline_worked_example() -> None:
    near(advantages(reinforce_plus_plus_baseline(), F1)[:, 0], 0.866025 * np.array([1, -1, -1, 1]))
    near(advantages(reinforce_plus_plus_baseline(over="tokens"), F1)[:, 0], np.array([2, -4, -4, 2]) / 3)


@pytest.mark.parametrize("over", ["sequences", "tokens"])
def test_reinforce_plus_plus_baseline_is_the_loop(over: str) -> None:
    centred = np.array([R[i] - R[GROUP[i] == GROUP].mean() for i in range(N)])
    values = centred if over == "sequences" else np.repeat(centred, MASKS.sum(1))
    A = on_tokens((centred - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8), MASKS)

    def loss(x: np.ndarray) -> float:
        k2 = averaged(-0.5 * (x - REF) ** 2, MASKS, "token")
        return clipped_loss(A, x, BEHAVIOUR, MASKS, 0.2, 0.2, "token") + 0.3 * k2

    check(reinforce_plus_plus_baseline(0.3, over), A, loss)


def test_loop_worked_example() -> None:
    four = batch_of(MASK, [1, 0.5, 0, 0.5], OLD)
    near(advantages(loop(), four)[:, 0], [2 / 3, 0, -2 / 3, 0])
    assert np.asarray(prepared(loop(), four).loss_weights).any(axis=1).tolist() == [True, False, True, False]
    row = batch_of(np.ones((2, 3)), [1.0, 0], np.zeros((2, 3)))
    change = np.array([[0.2, -0.3, 0.05], [-50, -50, -50]])
    # The second row's ratio is clipped at its lower bound: (1 - low) A with A = -1/2 in the example's units.
    for bounds, low, second in (("paper", 0.9, 0.528779), ("reciprocal", 1 / 1.1, 0.530294)):
        found = loss_of(loop(bounds=bounds), row, change)
        assert found == pytest.approx((-0.482015 / 0.5 + low) / 2, abs=2e-6)
        other = loss_of(loop(bounds=bounds), row, change[[1, 0]])
        assert other == pytest.approx((second / 0.5 - np.exp(-20)) / 2, abs=2e-6)


@pytest.mark.parametrize("span", ["token", "sequence"])
def test_loop_is_the_loop(span: str) -> None:
    A = np.array([R[i] - np.mean([R[j] for j in range(N) if GROUP[j] == GROUP[i] and j != i]) for i in range(N)])
    kept = np.abs(A) >= 0.4
    assert 0 < kept.sum() < N

    def loss(x: np.ndarray) -> float:
        ratio = (x - BEHAVIOUR) * MASKS
        ratio = ratio.sum(1, keepdims=True) * MASKS if span == "sequence" else ratio
        return clipped_loss(on_tokens(A, MASKS), ratio, 0 * ratio, MASKS & kept[:, None], 0.1, 0.1, "sequence")

    check(loop(span=span, least_advantage=0.4), on_tokens(A, MASKS), loss)


def test_loop_on_policy_has_the_advantages_of_rloo() -> None:
    near(advantages(loop(), BATCH), advantages(rloo(0.0), BATCH))
    on_policy = gradient_of(loop(least_advantage=0.0), BATCH, BEHAVIOUR)
    length = np.maximum(MASKS.sum(1, keepdims=True), 1)
    near(on_policy, gradient_of(rloo(0.0), BATCH, BEHAVIOUR) / length)
    with pytest.raises(InputError, match="bounds"):
        loop(bounds="code")


def test_spo_worked_example() -> None:
    """Trackers set by hand to the baselines of the example."""
    algorithm = spo_single_stream(prompts=4)
    state = algorithm.transform.init()._replace(value=jnp.array([0.2, 0.5, 0.9, 0.388889]))
    batch = batch_of(np.ones((4, 2)), [0.0, 1, 1, 1], -np.ones((4, 2)), range(4))
    A = np.asarray(prepared(algorithm, batch, state).advantages)
    near(A[:, 0], [-1.213179, 0.662411, -0.409355, 0.960123])


def test_spo_is_the_loop_over_updates() -> None:
    algorithm = spo_single_stream(prompts=100)
    state, value, memory = algorithm.transform.init(), np.full(3, 0.5), np.full(3, 1.0)
    seen, drift = np.zeros(3, bool), 0.01 * np.arange(N)
    for update, reward in enumerate((R, 1 - R, R)):
        batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32))
        batch = batch if update == 1 else batch.with_info(drift=jnp.asarray(drift, jnp.float32))
        A = reward - value[GROUP]
        A = (A - A.mean()) / (A.std(ddof=1) + 1e-8)
        if update == 2:
            ready = prepared(algorithm, batch, state)
            near(ready.advantages, on_tokens(A, MASKS), 1e-5)
        state, after = algorithm.transform.apply(state, batch)
        near(after.advantages, on_tokens(A, MASKS), 1e-5)
        for g in range(3):
            rows, kept = np.nonzero(np.equal(GROUP, g))[0], 0.875
            if update != 1:
                kept = np.mean([np.clip(2 ** (-(drift[i] * seen[g]) / 0.06), 0.875, 0.96) for i in rows])
            alpha, beta = kept * memory[g] * value[g], kept * memory[g] * (1 - value[g])
            alpha, beta = alpha + reward[rows].sum(), beta + (1 - reward[rows]).sum()
            value[g], memory[g] = alpha / (alpha + beta), alpha + beta
        seen[:] = True
    near(state.value[:3], value)
    near(state.memory[:3], memory)
    assert not state.seen[3:].any()


def test_the_loss_of_spo_is_the_loop() -> None:
    A = (R - 0.5 - (R - 0.5).mean()) / (R.std(ddof=1) + 1e-8)

    def loss(x: Any) -> Any:
        return clipped_loss(on_tokens(A, MASKS), x, BEHAVIOUR, MASKS, 0.2, 0.28, "token")

    check(spo_single_stream(), on_tokens(A, MASKS), loss)
