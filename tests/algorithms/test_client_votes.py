"""POPri: clipped votes of clients, ranks, and the loss of the pairs, against loops."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from batches import prepared, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.preferences.popri import clipped_votes, first_and_ranked, popri

BATCH, LOGP = random_batch(5, (5, 4, 2))
X = arrays(BATCH)
VOTES = np.random.default_rng(3).normal(size=(11, 6))


def scores() -> np.ndarray:
    total = np.zeros(11)
    for votes in VOTES.T:
        z = (votes - votes.mean()) / votes.std()
        total += z / max(1.0, float(np.sqrt((z**2).sum())))
    return total / 6


def test_popri_by_loop_and_worked_example() -> None:
    card = clipped_votes(jnp.asarray([[0.9, 0.2], [0.5, 0.8], [0.1, 0.5]]), jnp.ones(3, bool))
    np.testing.assert_allclose(card, [[0.707107, -0.707107], [0, 0.707107], [-0.707107, 0]], atol=1e-6)
    np.testing.assert_allclose(card.sum(1) / 2, [0, 0.353553, -0.353553], atol=1e-6)

    score, pairs = scores(), []
    for group in range(3):
        order = sorted(np.flatnonzero(X.group == group), key=lambda i: -score[i])
        pairs.append((order[0], order[min(2, len(order) - 1)]))

    def loss(logp: np.ndarray) -> float:
        u = ((logp - X.reference) * X.mask).sum(1)
        return float(np.mean([np.logaddexp(0, -0.3 * (u[w] - u[v])) for w, v in pairs]))

    batch = BATCH.with_info(votes=jnp.asarray(VOTES, jnp.float32))
    assert_matches_loop(learn(popri(rank=2, noise=0.0, beta=0.3), batch, LOGP), loss, LOGP)


def test_noise_is_normal_new_in_each_step_and_divided_by_the_clients() -> None:
    batch, _ = random_batch(1, (50,) * 40)
    batch = batch.with_info(votes=jnp.zeros((2000, 8)))  # no client prefers anything
    method = popri(noise=4.0)
    state, first = method.transform.apply(method.transform.init(), batch)
    second = method.transform.apply(state, batch)[1].reward
    assert float(jnp.std(first.reward)) == pytest.approx(0.5, rel=0.05)
    assert float(jnp.mean(first.reward)) == pytest.approx(0.0, abs=0.05)
    assert abs(np.corrcoef(first.reward, second)[0, 1]) < 0.1


def test_rows_without_votes_and_short_groups() -> None:
    votes = VOTES.copy()
    votes[[0, 9]] = np.nan
    found = prepared(popri(rank=1, noise=0.0), BATCH.with_info(votes=jnp.asarray(votes, jnp.float32)))
    assert np.isnan(found.reward).nonzero()[0].tolist() == [0, 9]
    pairs = first_and_ranked(7)(found)
    assert np.flatnonzero(pairs.valid).size == 2, "a group of one scored row has no pair"
    for chosen in np.flatnonzero(pairs.valid):
        mates = np.flatnonzero((X.group == X.group[chosen]) & ~np.isnan(np.asarray(found.reward)))
        assert found.reward[chosen] == max(found.reward[mates])
        assert found.reward[pairs.rejected[chosen]] == min(found.reward[mates])
