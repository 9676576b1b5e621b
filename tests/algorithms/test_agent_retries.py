"""Retries from a turn: the worked example, loops of credit and loss, and the limits of OPMD and of GRPO's baseline."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, finite_differences, gradient_of, loss_of, prepared

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.agents.r3l import amplified_advantages
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

# Rows of three, two, three and one turns, with observations between; the last is a reflection in a group of its own.
TURN = np.array(
    [
        [-1, 0, 0, -1, 1, 1, -1, 2],
        [-1, 0, 0, -1, 1, 1, -1, -1],
        [-1, 0, -1, 1, -1, 2, 2, -1],
        [0, 0, 0, -1, -1, -1, -1, -1],
    ]
)
GROUP = [0, 0, 0, 1]


def episodes(scores: Any, pivot: Any = (0, 0, 0, 0), group: Any = GROUP, **info: Any) -> Trajectories:
    mask = TURN >= 0
    N = len(TURN)
    known = {"pivot": np.asarray(pivot, float), "episode": np.arange(N) * 1.0, "first_turn": np.zeros(N), **info}
    random = np.random.default_rng(2)
    batch = batch_of(mask, scores, -random.gamma(2.0, 0.5, TURN.shape) * mask, group, info=known)
    return batch.replace(turn=jnp.asarray(TURN, jnp.int32), state_key=jnp.ones((N, 3), jnp.uint32))


def slow_advantages(scores: Any, group: Any, alpha: float = 3.0, full: float = 1.0, tau: float | None = None) -> Any:
    out = []
    for i, r in enumerate(scores):
        mates = [scores[j] for j in range(len(scores)) if group[j] == group[i] and not np.isnan(scores[j])]
        b = (
            0.0
            if len(mates) < 2
            else np.mean(mates)
            if tau is None
            else tau * np.log(np.mean(np.exp(np.array(mates) / tau)))
        )
        out.append(0.0 if np.isnan(r) else 1.0 if r >= full else alpha * (r - b) if r >= b else r - b)
    return np.array(out)


def test_r3l_worked_example_and_loop() -> None:
    """The card's advantages; then credit and loss of a batch with pivots, by a loop."""
    for rewards, wanted in (([1.0, 0, 0, 0], [1, -0.25, -0.25, -0.25]), ([0.5, 0.2, 0, 0.1], [0.9, 0, -0.2, -0.1])):
        found = advantages(get("r3l"), episodes(rewards, group=[0] * 4))
        np.testing.assert_allclose(found.max(axis=1) + found.min(axis=1), wanted, atol=1e-6)
    scores, pivot = [0.3, 1.5, 0.7, 1.0], [0, 1, 2, 0]
    batch = episodes(scores, pivot)
    A = slow_advantages(scores, GROUP)
    trained = (TURN >= 0) & (np.array(pivot)[:, None] <= TURN)
    assert trained.sum() == 5 + 2 + 2 + 3
    logp = np.where(TURN >= 0, -0.3 - 0.1 * np.arange(8), 0.0)

    def slow(at: np.ndarray) -> float:
        total = sum(A[i] * at[i, t] for i, t in zip(*np.nonzero(trained), strict=True))
        return float(-total / trained.sum() / (1 + 2.0))

    method = get("r3l", temperature=2.0)
    assert loss_of(method, batch, logp) == pytest.approx(slow(logp), abs=1e-6)
    np.testing.assert_allclose(gradient_of(method, batch, logp), finite_differences(slow, logp), atol=1e-6)


def test_a_kl_is_added_and_the_other_baseline_is_soft() -> None:
    scores = [0.3, -0.5, 0.7, np.nan]
    batch = episodes(scores, group=[0] * 4)
    wanted = slow_advantages(scores, [0] * 4, 2.0, 0.9, 0.5)
    assert wanted[3] == 0
    found = advantages(get("r3l", alpha=2.0, full_reward=0.9, baseline="log_mean_exp", temperature=0.5), batch)
    np.testing.assert_allclose(found[TURN == 0], wanted[np.nonzero(TURN == 0)[0]], atol=1e-6)
    logp = np.where(TURN >= 0, -0.5, 0.0)
    both = batch.replace(reference_logp=jnp.where(batch.action_mask, -0.7, 0.0))
    k2 = 0.5 * 0.2**2
    plain = loss_of(get("r3l"), both, logp)
    assert loss_of(get("r3l", kl_coefficient=0.1), both, logp) == pytest.approx(plain + 0.1 * k2, abs=1e-6)


def test_an_episode_of_several_rows_counts_once() -> None:
    """Rows 0 and 1 are one episode, whose second row begins with its turn 3; its pivot is turn 4."""
    info = {"episode": np.array([0, 0, 1, 2.0]), "first_turn": np.array([0, 3, 0, 0.0])}
    batch = prepared(get("r3l"), episodes([0.6, 0.6, 0.2, 0.1], (4, 4, 0, 0), [0] * 4, **info))
    A = np.asarray(batch.advantages)[np.arange(4), np.argmax(TURN >= 0, axis=1)]
    np.testing.assert_allclose(A, [0.9, 0.9, -0.1, -0.2], atol=1e-6)
    weights = np.asarray(batch.loss_weights)
    np.testing.assert_array_equal(weights[0], 0)
    np.testing.assert_array_equal(weights[1] > 0, TURN[1] == 1)
    np.testing.assert_array_equal(weights[2] > 0, TURN[2] >= 0)


def test_without_retries_and_amplification_it_is_reinforce_above_the_group_s_mean() -> None:
    """No row is solved, alpha 1 and half the loss: bit by bit the score function with GRPO's baseline, OPMD without
    its square."""
    batch = episodes([0.3, 0.1, 0.7, 0.2], group=[0] * 4)
    mine = get("r3l", alpha=1.0, full_reward=9.0)
    other = get("opmd", coefficient=0.0)
    np.testing.assert_array_equal(advantages(mine, batch), advantages(other, batch))
    logp = np.where(TURN >= 0, -0.5, 0.0)
    np.testing.assert_array_equal(2 * gradient_of(mine, batch, logp), gradient_of(other, batch, logp))
    # Without pivots, as those of ordinary agents, nothing is left out.
    info = {name: value for name, value in (batch.info or {}).items() if name != "pivot"}
    np.testing.assert_array_equal(gradient_of(mine, batch.replace(info=info), logp), gradient_of(mine, batch, logp))


def test_equal_groups_learn_where_they_are_solved_alone() -> None:
    for reward, wanted in ((0.4, 0.0), (1.0, 1.0)):
        found = amplified_advantages(jnp.full(4, reward), jnp.zeros(4, jnp.int32), jnp.ones(4, bool))
        np.testing.assert_array_equal(found, wanted)


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="baseline"):
        get("r3l", baseline="median")
    with pytest.raises(InputError, match="reflection_tokens"):
        get("r3l", reflection_tokens=0)
