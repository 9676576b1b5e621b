"""Score-function methods: worked examples, loops in double precision, gradients, and special cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    MASK,
    OLD,
    REFERENCE,
    REWARD,
    advantages,
    batch_of,
    finite_differences,
    gradient_of,
    loss_of,
    near,
    prepared,
    random_batch,
)  # fmt: skip
from plain_losses import averaged, clipped_loss, on_tokens, score_loss

from jaxrl_llm.algorithms.classic.gpg import gpg
from jaxrl_llm.algorithms.classic.opo import opo
from jaxrl_llm.algorithms.classic.reinforce import reinforce
from jaxrl_llm.algorithms.classic.remax import remax
from jaxrl_llm.algorithms.classic.rloo import rloo
from jaxrl_llm.algorithms.score_function.optimal_token_baseline import optimal_token_baseline
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.utils.errors import InputError

F1 = batch_of(reference_logp=REFERENCE)
BATCH, NEAR = random_batch(0)
MASKS = np.asarray(BATCH.action_mask)
R, GROUP = np.asarray(BATCH.reward, np.float64), np.asarray(BATCH.group)
BEHAVIOUR, REF, OLDER = (
    np.asarray(x, np.float64) for x in (BATCH.behaviour_logp, BATCH.reference_logp, BATCH.old_logp)
)


def check(algorithm: Algorithm, A: Any, loss: Callable[..., float], batch: Any = BATCH) -> None:
    """Advantages [N, L], loss and its gradient are those of the loop `loss(A, logp)`."""
    near(advantages(algorithm, batch), A, 1e-5)
    assert loss_of(algorithm, batch, NEAR) == pytest.approx(loss(A, NEAR), rel=1e-5, abs=1e-5)
    near(gradient_of(algorithm, batch, NEAR), finite_differences(lambda x: loss(A, x), NEAR), 1e-5)


def others(i: int) -> list[int]:
    return [j for j in range(len(R)) if GROUP[j] == GROUP[i] and j != i]


def test_reinforce_worked_example() -> None:
    assert loss_of(reinforce(baseline="none"), F1) == pytest.approx(1.4875, abs=1e-6)
    for baseline in ("batch", "group"):
        assert loss_of(reinforce(baseline), F1) == pytest.approx(0.4375, abs=1e-6)
    near(gradient_of(reinforce(), F1), -(REWARD - 0.5)[:, None] * MASK / 4)


def test_reinforce_is_the_loop() -> None:
    gamma, token_rewards = 0.9, 0.1 * np.arange(66).reshape(11, 6) % 0.7
    batch = BATCH.replace(token_rewards=np.asarray(token_rewards, np.float32))
    A = np.zeros(MASKS.shape)
    for n in range(len(R)):
        T, b = MASKS[n].sum(), np.mean([R[j] for j in others(n)])
        for t in range(T):
            earned = sum(gamma ** (s - t) * token_rewards[n, s] for s in range(t, T))
            A[n, t] = earned + gamma ** (T - 1 - t) * R[n] - b
    check(reinforce("leave_one_out", gamma), A, lambda A, x: score_loss(A, x, MASKS), batch)


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_reinforce_with_an_importance_weight_is_the_clipped_product(average: str) -> None:
    A = on_tokens(R - R.mean(), MASKS)
    weight = np.minimum(np.exp(NEAR - BEHAVIOUR), 1.1)
    check(reinforce(average=average, importance_cap=1.1), A, lambda A, x: averaged(weight * A * x, MASKS, average))


def test_rloo_worked_example() -> None:
    three = batch_of(MASK[:3], [0.2, 0.5, 0.9], OLD[:3])
    near(advantages(rloo(0.0), three)[:, 0], [-0.5, -0.05, 0.55])
    near(advantages(rloo(0.0), F1)[:, 0], [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert loss_of(rloo(0.0, loss="sequence_clip"), F1) == pytest.approx(-0.021255, abs=1e-6)


def rloo_advantage(beta: float) -> np.ndarray:
    total = R - beta * ((BEHAVIOUR - REF) * MASKS).sum(1)
    return np.array([total[i] - np.mean(total[others(i)]) for i in range(len(R))])


def test_rloo_is_the_loop() -> None:
    A = on_tokens(rloo_advantage(0.3), MASKS)
    check(rloo(0.3), A, lambda A, x: score_loss(A, x, MASKS))
    check(rloo(0.3, "token_clip", 0.1), A, lambda A, x: clipped_loss(A, x, BEHAVIOUR, MASKS, 0.1, 0.1, "token"))

    def by_sequence(A: np.ndarray, x: np.ndarray) -> float:
        gain = np.zeros(len(R))
        for i in range(len(R)):
            S = np.exp(((x - BEHAVIOUR) * MASKS)[i].sum())
            gain[i] = min(S * A[i, 0], min(max(S, 0.8), 1.2) * A[i, 0])
        return -gain.mean()

    check(rloo(0.3, "sequence_clip"), A, by_sequence)


def test_rloo_normalised_over_the_batch() -> None:
    A = rloo_advantage(0.3)
    near(advantages(rloo(0.3, normalise=True), BATCH)[:, 0], (A - A.mean()) / (A.std(ddof=1) + 1e-4), 1e-5)


def test_rloo_without_kl_is_reinforce_with_its_baseline_and_needs_no_reference() -> None:
    assert rloo(0.0).needs == frozenset()
    near(gradient_of(rloo(0.0), BATCH, NEAR), gradient_of(reinforce("leave_one_out"), BATCH, NEAR))


def test_remax_worked_example() -> None:
    mask, logp = [[1, 1, 1], [1, 1, 0]], [[-1, -0.5, -0.2], [-0.7, -0.1, 0]]
    reference = np.array([[-1.1, -0.6, -0.1], [-0.7, -0.2, 0]])
    batch = batch_of(mask, [0.8, 0.1], np.array(logp), reference_logp=reference)
    batch = batch.with_info(greedy_reward=np.array([0.5, 0.3], np.float32))
    near(advantages(remax(), batch), [[0.295, 0.295, 0.305], [-0.2, -0.205, 0]])
    assert loss_of(remax(average="token"), batch, logp) == pytest.approx(0.0686, abs=1e-6)
    assert loss_of(remax(), batch, logp) == pytest.approx(0.1715, abs=1e-6)


def test_remax_is_the_loop() -> None:
    greedy = np.linspace(-0.4, 1.2, 11)
    batch = BATCH.with_info(greedy_reward=np.asarray(greedy, np.float32))
    A = np.zeros(MASKS.shape)
    for n, t in zip(*np.nonzero(MASKS), strict=True):
        margin = min(max(R[n] - greedy[n], -0.5), 0.5)
        A[n, t] = 0.9 ** (MASKS[n].sum() - 1 - t) * margin - 0.2 * (BEHAVIOUR - REF)[n, t]
    check(remax(0.9, 0.2, 0.5), A, lambda A, x: score_loss(A, x, MASKS), batch)
    with pytest.raises(InputError, match="greedy_reward"):
        advantages(remax(), BATCH)


def test_remax_with_the_greedy_reward_for_reward_learns_nothing() -> None:
    batch = BATCH.with_info(greedy_reward=BATCH.reward)
    assert np.count_nonzero(gradient_of(remax(kl_coefficient=0.0), batch, NEAR)) == 0


def test_opo_worked_example_and_loop() -> None:
    near(advantages(opo(), F1)[:, 0], [1 / 3, -2 / 3, -2 / 3, 1 / 3])
    size, A = MASKS.sum(1), np.zeros(len(R))
    for i in range(len(R)):
        group = [i, *others(i)]
        A[i] = R[i] - sum(size[j] * R[j] for j in group) / sum(size[j] for j in group)
    check(opo(), on_tokens(A, MASKS), lambda A, x: score_loss(A, x, MASKS))
    near([advantages(opo(), BATCH)[g == GROUP].sum() for g in range(3)], 0, 1e-5)


def test_gpg_worked_example() -> None:
    mask = np.ones((12, 2))
    batch = batch_of(mask, [1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0], -mask, np.repeat([0, 1, 2], 4))
    near(advantages(gpg(), batch)[:, 0], [1.5, -1.5, -1.5, 1.5] + [0] * 8)
    near(advantages(gpg(counted_by="nonzero"), batch)[:4, 0], [1, -1, -1, 1])
    informative = gpg(resample=True).curriculum.informative(batch)  # type: ignore[union-attr]
    assert informative.tolist() == [True] * 4 + [False] * 8


def test_gpg_is_the_loop() -> None:
    reward = R.copy()
    reward[GROUP == 2] = 1.0
    batch, A = BATCH.replace(reward=np.asarray(reward, np.float32)), np.zeros(len(R))
    for i in range(len(R)):
        A[i] = 11 / 8 * (reward[i] - np.mean(reward[[i, *others(i)]]))
    check(gpg(), on_tokens(A, MASKS), lambda A, x: score_loss(A, x, MASKS, "token"), batch)


def token_baseline_batch(mask: Any, reward: Any, pi: Any, q: Any) -> Any:
    logp = np.log(np.where(np.asarray(pi) > 0, pi, 1.0))
    return batch_of(mask, reward, logp).with_info(squared_probability=np.asarray(q, np.float32))


def test_optimal_token_baseline_worked_example() -> None:
    batch = token_baseline_batch(
        [[1, 1, 1], [1, 1, 0], [1, 0, 0]], [1.0, 0, 1],
        [[0.5, 0.8, 0.9], [0.4, 0.6, 0], [0.7, 0, 0]], [[0.4, 0.66, 0.82], [0.3, 0.5, 0], [0.55, 0, 0]],
    )  # fmt: skip
    A = np.array([[0.476190, 0.634921, 0], [-0.523810, -0.365079, 0], [0.476190, 0, 0]])
    near(advantages(optimal_token_baseline(zero_tail=False), batch), A)
    A[0, 2] = 1
    near(advantages(optimal_token_baseline(), batch), A)
    turns = token_baseline_batch(
        [[1, 0, 1], [1, 1, 0]], [1.0, 0], [[0.5, 0, 0.8], [0.4, 0.6, 0]], [[0.4, 0, 0.66], [0.3, 0.5, 0]]
    )
    near(
        advantages(optimal_token_baseline(), turns),
        [[0.555556, 0, 0.634921], [-0.444444, -0.365079, 0]],
    )


@pytest.mark.parametrize("corrected", [False, True])
def test_optimal_token_baseline_is_the_loop(corrected: bool) -> None:
    q = np.linspace(0.2, 0.9, 66).reshape(11, 6)
    batch = BATCH.with_info(squared_probability=np.asarray(q, np.float32))
    w = np.maximum(1 - 2 * np.exp(OLDER) + q, 0) * (np.exp(2 * (OLDER - BEHAVIOUR)) if corrected else 1)
    W, A = np.cumsum(w * MASKS, axis=1), np.zeros(MASKS.shape)
    for n, t in zip(*np.nonzero(MASKS), strict=True):
        alive = [j for j in [n, *others(n)] if MASKS[j, t]]
        B = sum(R[j] * W[j, t] for j in alive) / (sum(W[j, t] for j in alive) + 1e-8) if len(alive) > 1 else 0.0
        A[n, t] = R[n] - B
    check(optimal_token_baseline(corrected=corrected), A, lambda A, x: score_loss(A, x, MASKS), batch)


def test_unscored_rows_take_no_part() -> None:
    """Like rows of another group with advantage 0; the loss still counts their sequences."""
    reward = R.copy()
    reward[1] = np.nan
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32)).with_info(
        greedy_reward=np.full(11, 0.3, np.float32), squared_probability=np.full((11, 6), 0.4, np.float32)
    )
    kept = np.delete(np.arange(11), 1)
    without = batch.replace(group=batch.group.at[1].set(9), reward=batch.reward.at[1].set(0.0))
    for algorithm in (rloo(), opo(), remax(), optimal_token_baseline(), reinforce("group")):
        A = advantages(algorithm, batch)
        assert np.isfinite(A).all()
        assert (A[1] == 0).all()
        near(A[kept], advantages(algorithm, without)[kept], 1e-5)


def test_bad_choices_are_refused() -> None:
    for build in (lambda: reinforce("mode"), lambda: rloo(loss="ppo"), lambda: gpg(counted_by="all"), lambda: opo("x")):
        with pytest.raises(InputError):
            build()
    assert prepared(reinforce(), BATCH).advantages is not None
