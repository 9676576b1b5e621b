"""PDPPO: its targets against a loop, and its advantages on a Markov task with random observations against GAE's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import finite_differences, gradient_of, outputs_of, prepared
from turn_episodes import assert_close, episodes, of_turns

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.turn_credit.pdppo import pdppo
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.in_jax.settings import LabSettings
from jaxrl_llm.in_jax.tasks import get_task
from jaxrl_llm.in_jax.train import QUICK_COMPILE, make_train
from jaxrl_llm.utils.errors import InputError

STATES, ACTIONS, TURNS = 3, 2, 3
GAMMA = 0.9


class Chain:
    """A Markov task: a reply is an action and a token that ends it, the observation the next state, drawn at random."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.next = random.dirichlet([0.5] * STATES, size=(STATES, ACTIONS))
        self.reward = random.normal(size=(STATES, ACTIONS))
        self.policy = random.dirichlet([2.0] * ACTIONS, size=STATES)
        self.V, self.W = np.zeros((TURNS + 1, STATES)), np.zeros((TURNS, STATES, ACTIONS))
        for k in reversed(range(TURNS)):
            for s in range(STATES):
                for a in range(ACTIONS):
                    self.W[k, s, a] = self.reward[s, a] + GAMMA * self.next[s, a] @ self.V[k + 1]
                self.V[k, s] = self.policy[s] @ self.W[k, s]

    def play(self, number: int, seed: int) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
        """States, actions and rewards of so many episodes."""
        random = np.random.default_rng(seed)
        states, actions, rewards = list[list[int]](), list[list[int]](), list[list[float]]()
        for _ in range(number):
            s = int(random.integers(STATES))
            path, own, earned = list[int](), list[int](), list[float]()
            for _ in range(TURNS):
                a = int(random.choice(ACTIONS, p=self.policy[s]))
                path.append(s)
                own.append(a)
                earned.append(float(self.reward[s, a]))
                s = int(random.choice(STATES, p=self.next[s, a]))
            states.append(path)
            actions.append(own)
            rewards.append(earned)
        return states, actions, rewards


def with_values(batch: Trajectories, V: np.ndarray, W: np.ndarray, heads: int = 2) -> Trajectories:
    """V[N, K] at first and W[N, K] at last tokens of turns; other numbers where a head is not read.

    One head: a critic of tokens, which has both in the places where it is read.
    """
    values = np.full((*batch.turn.shape, heads), 99.0)
    for i in range(len(V)):
        for k in range(V.shape[1]):
            first, last = np.flatnonzero(np.asarray(batch.turn[i]) == k)[[0, -1]]
            values[i, first, 0], values[i, last, -1] = V[i, k], W[i, k]
    return batch.replace(values=jnp.asarray(values if heads > 1 else values[..., 0], jnp.float32))


def right_values(number: int, heads: int) -> tuple[Trajectories, np.ndarray, Chain]:
    """Episodes with right values, the states and actions int[number, TURNS] of them, and their task."""
    chain = Chain(3)
    states, actions, rewards = chain.play(number, 5)
    s, a, k = np.asarray(states), np.asarray(actions), np.arange(TURNS)
    batch = with_values(episodes(states, rewards), chain.V[k, s], chain.W[k, s, a], heads)
    return batch, s * ACTIONS + a, chain


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("last_token", ["own", "shared"])
def test_targets_and_advantages_are_the_loop(lam: float, last_token: Any) -> None:
    """Turn after turn in double precision, of ragged episodes with scores; one row has none."""
    random = np.random.default_rng(1)
    sizes, score = [3, 1, 2, 3], np.array([1.0, 0.5, np.nan, -1.0])
    rewards = [list(random.normal(size=size)) for size in sizes]
    batch = episodes([[0] * size for size in sizes], rewards, score)
    V, W = random.normal(size=(2, 4, 3))
    values = np.full((*batch.turn.shape, 2), 99.0)
    A, told = np.zeros(batch.turn.shape), np.full(values.shape, np.nan)
    for i, size in enumerate(sizes):
        following = target = 0.0
        for k in reversed(range(size)):
            first, last = np.flatnonzero(np.asarray(batch.turn[i]) == k)
            values[i, first, 0], values[i, last, 1] = V[i, k], W[i, k]
            if np.isnan(score[i]):
                continue
            r = rewards[i][k] + (score[i] if k + 1 == size else 0)
            y_w = r + GAMMA * ((1 - lam) * following + lam * target)
            y_v = (1 - lam) * W[i, k] + lam * y_w
            told[i, first, 0], told[i, last, 1] = y_v, y_w
            A[i, first] = A[i, last] = W[i, k] - V[i, k]
            if last_token == "own":
                A[i, last] = r + GAMMA * following - W[i, k]
            following, target = V[i, k], y_v
    batch = batch.replace(values=jnp.asarray(values, jnp.float32))
    method = pdppo(gamma=GAMMA, lam=lam, last_token=last_token, whiten=False)
    ready = prepared(method, batch)
    np.testing.assert_allclose(ready.advantages, A, atol=2e-6)
    np.testing.assert_allclose(ready.need("head_returns"), told, atol=2e-6)

    def loss(logp: np.ndarray) -> float:
        rho = np.exp(logp - np.asarray(batch.behaviour_logp, np.float64))
        each = -np.minimum(rho * A, np.clip(rho, 0.8, 1.2) * A)
        counts = np.asarray(batch.action_mask) & ~np.isnan(score)[:, None]
        return float(each[counts].sum() / counts.sum())

    logp = np.asarray(batch.behaviour_logp, np.float64) + random.normal(size=A.shape) / 4
    found = gradient_of(method, batch, logp, values=np.asarray(values, np.float32))
    np.testing.assert_allclose(found, finite_differences(loss, logp), atol=2e-6)


def test_each_head_learns_its_own_state() -> None:
    """The value loss is 1/2 of the mean squares over turns, of V at first tokens and of W at last ones."""
    batch, _, _ = right_values(4, 2)
    method = pdppo(gamma=GAMMA, value_clip=None, value_coefficient=1.0, whiten=False)
    ready = prepared(method, batch)
    wrong = np.asarray(batch.values) + np.array([0.5, 2.0])
    _, metrics = method.objective(outputs_of(batch.behaviour_logp, values=wrong.astype(np.float32)), ready)
    told, mask = np.asarray(ready.need("head_returns")), ~np.isnan(np.asarray(ready.need("head_returns")))
    assert mask.sum(axis=(0, 1)).tolist() == [4 * TURNS] * 2
    wanted = sum(0.5 * np.mean((wrong[..., h] - told[..., h])[mask[..., h]] ** 2) for h in range(2))
    assert float(metrics["value/loss"]) == pytest.approx(wanted, rel=1e-5)


def test_with_right_values_it_has_gae_s_expectation_and_less_variance() -> None:
    """On random observations, given turn, state and action: the same mean as GAE's with one critic of tokens, whose
    values are as right, and no variance at all, where GAE's is that of all observations to come."""
    number = 3000
    batch, pairs, chain = right_values(number, 2)
    mine = np.asarray(of_turns(batch, pdppo(gamma=GAMMA, last_token="shared", whiten=False).transform))
    alone = right_values(number, 1)[0]
    both = np.asarray(prepared(get("poad", gamma=GAMMA, lam=0.95, whiten=False), alone).advantages)
    gae = np.stack([both[:, 1 + 3 * k] for k in range(TURNS)], axis=1)  # of actions, the first tokens of replies
    for k in range(TURNS):
        for pair in range(STATES * ACTIONS):
            rows = pairs[:, k] == pair
            s, a = divmod(pair, ACTIONS)
            exact = chain.W[k, s, a] - chain.V[k, s]
            np.testing.assert_allclose(mine[rows, k], exact, atol=1e-5)
            error = gae[rows, k].std() / np.sqrt(rows.sum())
            assert abs(gae[rows, k].mean() - exact) < 4 * error + 1e-5
            if k + 1 < TURNS:
                assert gae[rows, k].std() > 0.1
    assert mine[:, 0].var() < 0.7 * gae[:, 0].var()


def test_right_values_are_what_the_targets_are_around() -> None:
    """The expectation of each target, given what its head sees, is the right value, for any lam."""
    batch, pairs, chain = right_values(3000, 2)
    for lam in (0.0, 0.9):
        told = np.asarray(prepared(pdppo(gamma=GAMMA, lam=lam), batch).need("head_returns"))
        for k in range(TURNS):
            y_v, y_w = told[:, 1 + 3 * k, 0], told[:, 2 + 3 * k, 1]
            for pair in range(STATES * ACTIONS):
                rows, (s, a) = pairs[:, k] == pair, divmod(pair, ACTIONS)
                assert abs(y_w[rows].mean() - chain.W[k, s, a]) < 4 * y_w[rows].std() / np.sqrt(rows.sum()) + 1e-5
            for s in range(STATES):
                rows = pairs[:, k] // ACTIONS == s
                assert abs(y_v[rows].mean() - chain.V[k, s]) < 4 * y_v[rows].std() / np.sqrt(rows.sum()) + 1e-5


def test_observations_are_not_in_the_advantage_of_the_reply_before() -> None:
    """Another observation after a reply, and so another value of the next state, changes nothing but the last token."""
    batch, _, _ = right_values(4, 2)
    other = batch.replace(values=batch.values.at[:, 4, 0].add(3.0))  # V of the second turn
    shared, own = (pdppo(gamma=GAMMA, last_token=x, whiten=False) for x in ("shared", "own"))
    before, after = (of_turns(x, shared.transform) for x in (batch, other))
    assert_close([row[:1] for row in before], [row[:1] for row in after])
    assert_close([[x - 3.0 for x in row[1:2]] for row in before], [row[1:2] for row in after], 1e-5)
    change = np.asarray(prepared(own, other).advantages - prepared(own, batch).advantages)
    np.testing.assert_allclose(change[:, [1, 2, 4]], [[0, 3 * GAMMA, -3]] * 4, atol=1e-5)


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="lam"):
        pdppo(lam=1.5)
    with pytest.raises(InputError, match="last_token"):
        pdppo(last_token="none")  # type: ignore[arg-type]


@pytest.mark.heavy
def test_it_learns_in_the_laboratory() -> None:
    """Replies of one token to a place and a goal, which is another one at random as soon as it is reached."""
    task = get_task("text_maze", size=2, turns=4)
    settings = LabSettings(iterations=60, prompts=16, group_size=4, layers=1, critic_rate=10.0, learning_rate=3e-3)
    run = jax.jit(make_train(task, "pdppo", settings), compiler_options=QUICK_COMPILE)(jax.random.key(0))
    reward = np.asarray(run.metrics["reward"])
    assert reward[-10:].mean() > reward[:10].mean() + 0.4
