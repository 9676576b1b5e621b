"""Returns over time, against loops that walk each row backwards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.kl_rewards import adaptive_kl, kl_reward
from jaxrl_llm.advantages.returns import (
    at_last_action,
    clip_advantages,
    discounted_returns,
    explained_variance,
    gae,
    generalised_advantages,
    head_mean,
    length_adaptive,
    reward_to_go,
    sequence_values,
    terminal_rewards,
    whiten,
    whiten_advantages,
)
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, chain
from jaxrl_llm.utils.errors import InputError

N, L = 6, 9
random = np.random.default_rng(0)
# Prompt, actions, the environment's tokens, actions, padding; a row without actions and one without a score.
TURN = np.array(
    [
        [-1, 0, 0, -1, 1, 1, 1, -1, -1],
        [-1, -1, 0, -1, -1, 1, -1, 2, 2],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [-1, -1, -1, -1, -1, -1, -1, -1, -1],
        [-1, -1, -1, -1, 0, -1, -1, -1, -1],
        [-1, 0, 0, -1, -1, -1, -1, -1, -1],
    ]
)
MASK = TURN >= 0
REWARD = np.array([1.0, 0, 0.5, 1, 2, np.nan])
# Garbage off the actions must not leak.
TOKEN_REWARDS = np.where(MASK, random.normal(size=(N, L)), np.nan)
VALUES = np.where(MASK, random.normal(size=(N, L)), np.nan)
TURN_REWARDS = np.array([[1.0, 2, 5], [3, 4, np.nan], [5, 0, 7], [6, 7, 1], [8, 9, 1], [1, 1, 1]])


def batch_of(**fields: Any) -> Trajectories:
    zeros = jnp.zeros((N, L), jnp.int32)
    given = {"reward": REWARD, "behaviour_logp": random.normal(size=(N, L)), **fields}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}
    none = jnp.zeros(N, jnp.int32)
    truncated = jnp.arange(N) == 2
    return Trajectories(zeros, MASK | True, jnp.asarray(MASK), policy_step=zeros, turn=jnp.asarray(TURN), group=none,
                        prompt_id=none, truncated=truncated, **arrays)  # fmt: skip


def applied(transform: Transform, batch: Trajectories) -> Trajectories:
    return transform.apply(transform.init(), batch)[1]


def gae_loop(r: Any, V: Any, mask: Any, gamma: Any, lam: Any, after: Any = None) -> tuple[np.ndarray, np.ndarray]:
    gamma, lam = (np.broadcast_to(np.reshape(x, (-1, 1)) if np.ndim(x) == 1 else x, (N, L)) for x in (gamma, lam))
    A, R = np.zeros((N, L)), np.zeros((N, L))
    for n in range(N):
        ahead, running = 0.0 if after is None else after[n], 0.0
        for t in reversed(np.flatnonzero(mask[n])):
            running = r[n, t] + gamma[n, t] * ahead - V[n, t] + gamma[n, t] * lam[n, t] * running
            ahead, A[n, t], R[n, t] = V[n, t], running, running + V[n, t]
    return A, R


def test_rewards_are_paid_where_they_are_earned() -> None:
    found = terminal_rewards(batch_of(token_rewards=TOKEN_REWARDS, turn_rewards=TURN_REWARDS))
    expected = np.zeros((N, L))
    for n in range(5):
        at = np.flatnonzero(MASK[n])
        for t in at:
            expected[n, t] += TOKEN_REWARDS[n, t]
        if at.size:
            expected[n, at[-1]] += REWARD[n]
        for k in range(3):
            of_turn = np.flatnonzero(TURN[n] == k)
            if of_turn.size:
                expected[n, of_turn[-1]] += np.nan_to_num(TURN_REWARDS[n, k])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    score_only = np.asarray(terminal_rewards(batch_of()))
    np.testing.assert_array_equal(score_only.sum(axis=1), [1, 0, 0.5, 0, 2, 0])
    with pytest.raises(InputError, match="no rewards"):
        terminal_rewards(batch_of().replace(reward=None))


@pytest.mark.parametrize(
    ("gamma", "lam"),
    [(1.0, 0.95), (0.9, 0.0), (0.9, random.random(N)), (random.random((N, L)), random.random((N, L)))],
)
def test_gae_is_its_loop(gamma: Any, lam: Any) -> None:
    after = random.normal(size=N)
    for bootstrap in (None, after):
        given = {} if bootstrap is None else {"bootstrap": jnp.asarray(bootstrap, jnp.float32)}
        found = gae(jnp.asarray(TOKEN_REWARDS), jnp.asarray(VALUES), jnp.asarray(MASK), gamma, lam, **given)
        for a, b in zip(found, gae_loop(TOKEN_REWARDS, VALUES, MASK, gamma, lam, bootstrap), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def test_a_truncated_answer_goes_on_with_its_last_value() -> None:
    """T-PPO's worked example: a truncated row, and a finished row with a reward."""
    V, mask = jnp.asarray([[0.2, 0.3, 0.5, 0.4]]), jnp.ones((1, 4), bool)
    cut, _ = gae(jnp.zeros((1, 4)), V, mask, 1.0, 0.95, bootstrap=V[:, -1])
    np.testing.assert_allclose(cut[0], [0.199750, 0.105, -0.1, 0], atol=1e-6)
    done, _ = gae(jnp.asarray([[0, 0, 0, 1.0]]), V, mask, 1.0, 0.95)
    np.testing.assert_allclose(done[0], [0.714175, 0.6465, 0.47, 0.6], atol=1e-6)
    batch = batch_of(values=VALUES)
    found = applied(generalised_advantages(0.9, 0.8, bootstrap_truncated=True), batch)
    after = np.where(np.arange(N) == 2, VALUES[:, -1], 0.0)
    expected, _ = gae_loop(terminal_rewards(batch), VALUES, MASK, 0.9, 0.8, after)
    np.testing.assert_allclose(found.advantages[:5], expected[:5], atol=2e-6)


def test_reward_to_go_and_discounted_returns() -> None:
    found = reward_to_go(jnp.asarray(TOKEN_REWARDS), jnp.asarray(MASK), 0.9)
    expected, _ = gae_loop(TOKEN_REWARDS, np.zeros((N, L)), MASK, 0.9, 1.0)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    batch = batch_of()
    ready = applied(discounted_returns(0.5), batch)
    np.testing.assert_allclose(ready.advantages[0], [0, 1 / 16, 1 / 8, 0, 1 / 4, 1 / 2, 1, 0, 0], atol=1e-7)
    np.testing.assert_array_equal(ready.advantages[5], np.zeros(L))
    np.testing.assert_array_equal(ready.advantages, ready.returns)


def test_generalised_advantages_leave_unscored_rows_alone() -> None:
    batch = batch_of(values=VALUES)
    found = applied(generalised_advantages(0.9, length_adaptive(0.5), 1.0), batch)
    length = np.maximum(MASK.sum(axis=1), 1)
    lam = np.clip(1 - 1 / (0.5 * length), 0, 1)
    rewards, scored = np.asarray(terminal_rewards(batch)), MASK & ~np.isnan(REWARD)[:, None]
    A, _ = gae_loop(rewards, VALUES, scored, 0.9, lam)
    _, R = gae_loop(rewards, VALUES, scored, 0.9, 1.0)
    np.testing.assert_allclose(found.advantages, A, atol=2e-6)
    np.testing.assert_allclose(found.returns, R, atol=2e-6)
    explained = 1 - np.var((R - VALUES)[scored]) / np.var(R[scored])
    assert float(found.controls["explained_variance"]) == pytest.approx(explained, rel=1e-5)
    heads = np.stack([VALUES - 1, VALUES + 1], axis=-1)
    same = applied(generalised_advantages(0.9, length_adaptive(0.5), 1.0, heads=2), batch_of(values=heads))
    np.testing.assert_allclose(same.advantages, A, atol=3e-6)
    assert generalised_advantages(heads=2).needs == {"values:2"}
    for bad in ({"gamma": 1.5}, {"lam": -0.1}, {"lam_critic": float("nan")}):
        with pytest.raises(InputError, match=next(iter(bad))):
            generalised_advantages(**bad)


@pytest.mark.parametrize(
    ("alpha", "length", "lam"), [(0.05, 100, 0.8), (0.05, 1000, 0.98), (0.05, 20, 0), (0.5, 5, 0.6)]
)
def test_lambda_grows_with_the_length(alpha: float, length: int, lam: float) -> None:
    class OfLength:
        lengths = jnp.asarray([float(length), 0.0])

    assert float(length_adaptive(alpha)(OfLength())[0]) == pytest.approx(lam, abs=1e-6)  # type: ignore[arg-type]
    assert length_adaptive(alpha)(OfLength())[1] == 0  # type: ignore[arg-type]


def test_explained_variance_worked_example() -> None:
    R, V = jnp.asarray([1.0, 1, 0, 1]), jnp.asarray([0.8, 0.6, 0.3, 0.7])
    assert float(explained_variance(V, R, jnp.ones(4, bool))) == pytest.approx(0.613333, abs=1e-6)
    assert float(explained_variance(V, jnp.ones(4), jnp.ones(4, bool))) == 0
    assert float(explained_variance(R, R, jnp.zeros(4, bool))) == 0


def test_a_value_for_a_sequence() -> None:
    batch = batch_of(values=VALUES)
    ready = applied(sequence_values(), batch)
    last = np.array([VALUES[n, np.flatnonzero(MASK[n])[-1]] if MASK[n].any() else 0 for n in range(N)])
    np.testing.assert_allclose(at_last_action(batch.values, batch), last, atol=1e-6)
    expected = np.where(MASK & ~np.isnan(REWARD)[:, None], (REWARD - last)[:, None], 0)
    np.testing.assert_allclose(ready.advantages, expected, atol=1e-6)
    assert float(ready.returns[4, 4]) == 2.0
    assert head_mean(jnp.ones((2, 3, 4))).shape == (2, 3)


def test_whitening_over_tokens_and_over_sequences() -> None:
    A = np.where(MASK, random.normal(size=(N, L)), np.nan)
    scored = MASK & ~np.isnan(REWARD)[:, None]
    batch = batch_of(advantages=A)
    x = A[scored]
    found = np.asarray(applied(whiten_advantages(), batch).advantages)
    np.testing.assert_allclose(found[scored], (x - x.mean()) / x.std(ddof=1), atol=2e-6)
    assert (found[~scored] == 0).all()
    kept = np.asarray(applied(whiten_advantages(shift=False, ddof=0), batch).advantages)
    np.testing.assert_allclose(kept[scored], (x - x.mean()) / x.std() + x.mean(), atol=2e-6)
    means = np.array([A[n][scored[n]].mean() for n in range(N) if scored[n].any()])
    rows = np.asarray(applied(whiten_advantages("sequences"), batch).advantages)
    np.testing.assert_allclose(rows[scored], (x - means.mean()) / means.std(ddof=1), atol=2e-6)
    clipped = np.asarray(applied(chain(whiten_advantages(), clip_advantages(0.5)), batch).advantages)
    np.testing.assert_allclose(clipped, np.clip(found, -0.5, 0.5))


def test_there_is_nothing_to_whiten_in_one_value_or_in_equal_ones() -> None:
    one = jnp.asarray([3.7, 9.0])
    np.testing.assert_array_equal(whiten(one, jnp.asarray([True, False])), [0, 0])
    np.testing.assert_array_equal(whiten(jnp.full(7, 1234.567), jnp.ones(7, bool)), np.zeros(7))
    np.testing.assert_array_equal(whiten(one, jnp.zeros(2, bool)), [0, 0])


def test_a_penalty_as_a_reward() -> None:
    behaviour, reference = np.full((N, L), np.nan), np.full((N, L), np.nan)
    behaviour[MASK], reference[MASK] = random.normal(size=MASK.sum()), random.normal(size=MASK.sum())
    batch = batch_of(behaviour_logp=behaviour, reference_logp=reference)
    found = applied(kl_reward(0.1), batch).token_rewards
    np.testing.assert_allclose(found, np.where(MASK, -0.1 * (behaviour - reference), 0), atol=1e-6)
    twice = applied(chain(kl_reward(0.1), kl_reward(0.1, "k2")), batch).token_rewards
    np.testing.assert_allclose(
        np.where(MASK, twice - found, 0), np.where(MASK, -0.05 * (behaviour - reference) ** 2, 0), atol=1e-6
    )
    by_name = applied(chain(adaptive_kl(0.1), kl_reward("kl_coefficient")), batch).token_rewards
    np.testing.assert_allclose(by_name, found, atol=1e-7)
    assert kl_reward(0.1, of="old").needs == {"old_logp", "reference_logp"}
    with pytest.raises(InputError, match="estimator"):
        kl_reward(0.1, "k9")


def test_the_coefficient_follows_the_divergence_both_ways() -> None:
    behaviour, start = np.zeros((N, L)), 0.2
    for gap, error in ((2.0, 0.2), (1.05, 0.05), (0.1, -0.2)):
        batch = batch_of(behaviour_logp=behaviour, reference_logp=behaviour - gap)
        transform = adaptive_kl(start, target=1.0, horizon=50.0)
        state, first = transform.apply(transform.init(), batch)
        assert float(first.controls["kl_coefficient"]) == pytest.approx(start)
        assert float(state) == pytest.approx(start * (1 + error * 5 / 50), rel=1e-5)  # one row has no action


def test_hyperparameters_may_be_traced() -> None:
    batch = batch_of(values=VALUES)
    each = jax.vmap(lambda lam: applied(generalised_advantages(0.9, lam), batch).advantages)(jnp.asarray([0.0, 0.8]))
    np.testing.assert_allclose(each[1], applied(generalised_advantages(0.9, 0.8), batch).advantages, atol=1e-6)
