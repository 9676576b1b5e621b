"""SHOR-PSRO: the league's payoffs and mixtures against a loop over games."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of

from jaxrl_llm.algorithms.agents.shor_psro import league_mixture, shor_psro
from jaxrl_llm.core.population import League
from jaxrl_llm.games import shor
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.utils.errors import InputError

K, EVERY, RATE, RANGE = 4, 2, 0.3, 2.0


def rows_with(score: Any, member: Any) -> Any:
    """Rows of one action."""
    one = np.ones((len(score), 1))
    return batch_of(one, score, -one, info={"league_member": np.asarray(member, np.float32)})


def solver(payoffs: Any, iteration: Any) -> Any:
    return jax.nn.softmax(iteration * payoffs.sum(axis=1))


def test_payoffs_and_mixtures_are_the_loop() -> None:
    random = np.random.default_rng(0)
    transform = league_mixture(League(K, EVERY), solver, RATE, RANGE)
    state = transform.init()
    own, M, x = np.zeros(K), np.zeros((K, K)), np.array([1.0, 0, 0, 0])
    for update in range(1, 12):
        member, score = random.integers(0, K, 6), random.normal(size=6)
        score[0] = np.nan
        state, batch = transform.apply(state, rows_with(score, member))
        snapshots = (update - 1) // EVERY
        policy = [k if k <= snapshots else 0 for k in range(K)]  # places that nobody took are the first policy's
        for k in range(K):
            of = [score[i] / RANGE for i in range(1, 6) if policy[member[i]] == k]
            own[k] += RATE * (np.mean(of) - own[k]) if of else 0
        if update % EVERY == 0:
            taken = update // EVERY
            place = 1 + (taken - 1) % (K - 1)
            row = np.array([own[policy[k]] for k in range(K)])
            row[place] = 0
            M[place], M[:, place], own = row, -row, row.copy()
            policy = [k if k <= taken else 0 for k in range(K)]
            solved = np.asarray(solver(jnp.asarray(M[np.ix_(policy, policy)], jnp.float32), taken))
            x = np.array([sum(solved[j] for j in range(K) if policy[j] == k) for k in range(K)])
        np.testing.assert_allclose(state.matrix, M, atol=1e-5)
        np.testing.assert_allclose(state.own, own, atol=1e-5)
        assert batch.controls is not None
        np.testing.assert_allclose([batch.controls[f"league/{k}"] for k in range(K)], x, atol=1e-5)
    assert sum(x) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(M, -M.T)


def test_a_member_that_always_loses_is_not_played() -> None:
    """The newest snapshot beats all others: in the end they are drawn by the softmax's share alone."""
    transform = league_mixture(League(3, 1), shor(2), 1.0)
    state = transform.init()
    for _ in range(2):
        state, batch = transform.apply(state, rows_with(np.ones(3), np.arange(3)))
    assert batch.controls is not None
    assert state.matrix.tolist() == [[0, -1, -1], [1, 0, -1], [1, 1, 0]]
    assert batch.controls["league/2"] > 0.9


def test_without_a_game_it_says_what_to_give() -> None:
    with pytest.raises(InputError, match="size"):
        shor_psro(size=1)
    config = TrainConfig(algorithm="shor_psro", environment="jaxrl_llm.environments.games:kuhn", prompts="x.jsonl")
    algorithm = make_algorithm(config)
    with pytest.raises(InputError, match="a league needs a game of several players"):
        rollout_of(config, algorithm)
