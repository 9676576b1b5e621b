"""Credit of windows: a worked example, a loop in double precision, and the special case without windows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages.returns import gae, generalised_advantages
from jaxrl_llm.advantages.tokens import extended_gae
from jaxrl_llm.algorithms.policy_loss.t_ppo import windowed_advantages
from jaxrl_llm.core.trajectory import Trajectories, with_totals
from jaxrl_llm.utils.errors import InputError

N, L = 9, 9
V_CARD = [0.2, 0.3, 0.5, 0.4]


def batch_of(mask: np.ndarray, values: np.ndarray, reward: np.ndarray, **info: np.ndarray) -> Trajectories:
    N, L = mask.shape
    zeros, rows, action = jnp.zeros((N, L), jnp.int32), jnp.arange(N), jnp.asarray(mask, bool)
    return Trajectories(
        tokens=zeros, token_mask=action, action_mask=action, behaviour_logp=zeros * 1.0, policy_step=zeros, turn=zeros,
        group=rows, prompt_id=rows, truncated=rows < 0, reward=jnp.asarray(reward, jnp.float32),
        values=jnp.asarray(values, jnp.float32), info={k: jnp.asarray(x) for k, x in info.items()} or None,
    )  # fmt: skip


def ragged(seed: int) -> tuple[Trajectories, np.ndarray, np.ndarray, np.ndarray]:
    """Rows with environment tokens, and windows of any length at their ends: unfinished, finished, idle, unscored.

    Row 0 continues, row 1 was finished earlier, rows 2 to 4 were finished in this step, but row 2 has no score.
    """
    random = np.random.default_rng(seed)
    mask = (np.arange(L) < random.integers(3, L + 1, N)[:, None]) & (np.arange(L) > 0)
    mask &= random.random((N, L)) < 0.8
    mask[:, 1:3] = True
    unfinished = random.random(N) < 0.4
    unfinished[:5] = [True, False, False, False, False]
    from_here = random.integers(0, L, N)
    from_here[1:5] = [L, 0, 2, 2]
    window = mask & (np.arange(L) >= from_here[:, None])
    unfinished &= window.any(axis=1)
    reward = random.normal(size=N)
    reward[2] = np.nan
    reward[unfinished] = np.nan
    values = np.where(mask, random.normal(size=(N, L)), np.nan)
    return batch_of(mask, values, reward, window=window, unfinished=unfinished), mask, window, unfinished


def loop(V: list[float], last_reward: float, goes_on: bool, gamma: float, lam: float) -> list[float]:
    """The sums of the definition as loops."""
    n = len(V)
    delta = []
    for t in range(n):
        after = V[t + 1] if t + 1 < n else (V[t] if goes_on else 0.0)
        delta.append((last_reward if t + 1 == n else 0.0) + gamma * after - V[t])
    return [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, n)) for t in range(n)]


def test_the_worked_example() -> None:
    rewards = jnp.asarray([[0.0, 0, 0, 0], [0, 0, 0, 1]])
    found = extended_gae(rewards, jnp.asarray([V_CARD] * 2), jnp.ones((2, 4), bool), jnp.asarray([True, False]))
    np.testing.assert_allclose(found[0], [0.199750, 0.105000, -0.100000, 0], atol=1e-6)
    np.testing.assert_allclose(found[1], [0.714175, 0.646500, 0.470000, 0.600000], atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.6)])
def test_it_is_its_loop(seed: int, gamma: float, lam: float) -> None:
    batch, mask, window, unfinished = ragged(seed)
    _, ready = (transform := windowed_advantages(gamma, lam)).apply(transform.init(), batch)
    values, reward = np.asarray(batch.values, np.float64), np.asarray(batch.reward, np.float64)
    A, R, taught = np.zeros((N, L)), np.zeros((N, L)), np.zeros((N, L), bool)
    for n in range(N):
        scored = not np.isnan(reward[n])
        if window[n].any() and (scored or unfinished[n]):
            A[n, window[n]] = loop(list(values[n, window[n]]), 0.0 if unfinished[n] else reward[n], unfinished[n],
                                   gamma, lam)  # fmt: skip
        if window[n].any() and scored and not unfinished[n]:
            R[n, mask[n]], taught[n] = reward[n], mask[n]
    assert taught.sum() > window[taught.any(axis=1)].sum(), "the critic learns from earlier windows too"
    np.testing.assert_allclose(ready.advantages, A, atol=1e-5)
    np.testing.assert_allclose(ready.returns, R, atol=1e-6)
    np.testing.assert_array_equal(ready.weights, window.astype(float))
    np.testing.assert_allclose(ready.need("value_weights"), taught * N / taught.sum(), rtol=1e-6)
    here, there = np.where(taught, values, 0.0)[taught], R[taught]
    explained = 1 - np.var(there - here) / np.var(there)
    assert float(ready.controls["explained_variance"]) == pytest.approx(explained, rel=1e-4)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_nothing_cut_is_gae(seed: int, lam: float) -> None:
    """Finished rows whose window covers them, marked or by default, have GAE advantages and Monte Carlo returns."""
    batch = ragged(seed)[0].replace(info=None)
    plain = generalised_advantages(1.0, lam, lam_critic=1.0)
    _, expected = plain.apply(plain.init(), batch)
    windows = windowed_advantages(1.0, lam)
    told = batch.with_info(window=batch.action_mask, unfinished=jnp.zeros(N, bool))
    for given_batch in (batch, told):
        _, found = windows.apply(windows.init(), given_batch)
        np.testing.assert_allclose(found.advantages, expected.advantages, atol=1e-5)
        np.testing.assert_allclose(found.returns, expected.returns, atol=1e-5)
        np.testing.assert_array_equal(found.loss_weights, batch.loss_weights)


def test_a_cut_row_that_is_all_window_is_a_row_out_of_budget_without_a_reward() -> None:
    mask, values = np.ones((1, 4)), np.asarray([V_CARD])
    cut = batch_of(mask, values, np.array([np.nan]), window=mask > 0, unfinished=np.array([True]))
    budget = batch_of(mask, values, np.zeros(1)).replace(truncated=jnp.asarray([True]))
    windows, plain = windowed_advantages(0.9, 0.8), generalised_advantages(0.9, 0.8, bootstrap_truncated=True)
    found, expected = (t.apply(t.init(), b)[1].advantages for t, b in ((windows, cut), (plain, budget)))
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_at_lambda_1_a_window_is_worth_what_it_adds_to_the_value() -> None:
    """gamma = lam = 1: the sum telescopes to V_n - V_t where the row continues, and to r - V_t where it is finished."""
    random = np.random.default_rng(0)
    V, window = random.normal(size=(2, 7)), np.arange(7) >= 3
    found = extended_gae(
        jnp.asarray([[0.0] * 7, [0.0] * 6 + [2.0]]), jnp.asarray(V, jnp.float32), jnp.asarray([window] * 2),
        jnp.asarray([True, False]), 1.0, 1.0,
    )  # fmt: skip
    np.testing.assert_allclose(found[0], np.where(window, V[0, -1] - V[0], 0.0), atol=1e-6)
    np.testing.assert_allclose(found[1], np.where(window, 2.0 - V[1], 0.0), atol=1e-6)


def test_what_lies_before_the_window_is_not_looked_at() -> None:
    mask = np.ones((1, 6))
    window = np.arange(6)[None] >= 3
    values = np.asarray([[9.0, np.nan, -7, 0.2, 0.3, 0.5]])
    batch = batch_of(mask, values, np.ones(1), window=window, unfinished=np.array([False]))
    windows = windowed_advantages()
    found = windows.apply(windows.init(), batch)[1].advantages[0, 3:]
    short = gae(*(jnp.asarray(x) for x in ([[0.0, 0, 1]], [[0.2, 0.3, 0.5]], [[True] * 3])))[0][0]
    np.testing.assert_allclose(found, short, atol=1e-7)


def test_a_step_in_which_nothing_was_finished_teaches_the_critic_nothing() -> None:
    batch, mask, window, _ = ragged(1)
    idle = batch.with_info(unfinished=jnp.asarray(window.any(axis=1)))
    windows = windowed_advantages()
    _, found = windows.apply(windows.init(), idle.replace(reward=jnp.full(N, jnp.nan)))
    for x in (found.returns, found.need("value_weights"), found.controls["explained_variance"]):
        np.testing.assert_array_equal(x, 0.0)
    assert np.isfinite(np.asarray(found.advantages)).all()
    assert np.abs(np.asarray(found.advantages)[mask]).max() > 0.1


def test_rewards_of_actions_count_in_the_window_and_weights_are_kept() -> None:
    """A penalty of an action in the window and of one before it; a token dropped before stays so for both losses."""
    mask, window = np.ones((2, 4)), np.asarray([[0, 0, 1, 1]] * 2, bool)
    batch = batch_of(mask, np.zeros((2, 4)), np.array([np.nan, 1.0]), window=window, unfinished=np.array([True, False]))
    penalty = jnp.asarray([[-5.0, 0, -0.5, 0]] * 2)
    batch = batch.replace(token_rewards=penalty, weights=jnp.asarray([[1.0, 1, 0, 1], [1.0, 0, 1, 1]]))
    windows = windowed_advantages(1.0, 1.0)
    _, found = windows.apply(windows.init(), batch)
    np.testing.assert_allclose(found.advantages, [[0, 0, -0.5, 0], [0, 0, 0.5, 1]], atol=1e-7)
    np.testing.assert_allclose(found.returns, [[0] * 4, [-4.5, 0.5, 0.5, 1]], atol=1e-7)
    np.testing.assert_allclose(found.weights, [[0, 0, 0, 1], [0, 0, 1, 1]])
    np.testing.assert_allclose(found.need("value_weights"), [[0] * 4, [2 / 3, 0, 2 / 3, 2 / 3]], rtol=1e-6)
    assert float(with_totals(found).totals["tokens"]) == 3


def test_numbers_out_of_range() -> None:
    for wrong in ({"gamma": 1.1}, {"lam": -0.1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            windowed_advantages(**wrong)
