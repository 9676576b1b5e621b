"""Credit by chunks: the worked example, a loop, what is taken over from a success, and the limit of plain REINFORCE."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, gradient_of, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

TURN = np.array([[-1, 0, 0, -1, 1, 1, -1, 2], [-1, 0, 0, -1, 1, 1, -1, -1], [-1, 0, 0, -1, 1, 1, -1, 2]])


def chunks(scores: list[float], old: np.ndarray | None = None, **info: np.ndarray) -> Trajectories:
    """Episodes of three, two and three chunks, with observations between. old: log pi_old - log pi_behaviour."""
    mask, logp = TURN >= 0, np.where(TURN >= 0, -1.0, 0.0)
    batch = batch_of(
        mask, scores, logp, old_logp=logp + (0.0 if old is None else old), info=info or None,
        state_key=np.ones((3, 3), np.uint32),
    )  # fmt: skip
    return batch.replace(turn=jnp.asarray(TURN, jnp.int32))


def test_ipa_worked_example_and_loop() -> None:
    """The card's: returns of three chunks, and the weights of two chunks of a success and a failure."""
    found = advantages(get("ipa"), chunks([1.0, 1.0, 1.0]))
    np.testing.assert_allclose(found[0], [0, 0.9025, 0.9025, 0, 0.95, 0.95, 0, 1], atol=1e-6)
    moved = np.array([0, 0.1, -0.2, 0, 0.3, 0.05, 0, 0.0])
    for score, weights in ((1.0, [0.95, 0.95, 1, 1]), (0.0, [-0.903668, -0.903668, -1, -1])):
        batch = chunks([1.0, score, 1.0])
        logp = np.asarray(batch.behaviour_logp) + moved * (TURN >= 0)
        found = gradient_of(get("ipa"), batch, logp)[1]
        np.testing.assert_allclose(found[[1, 2, 4, 5]], -np.array(weights) / 3, atol=1e-6)
        assert not found[[0, 3, 6, 7]].any()

    random = np.random.default_rng(3)
    old = np.where(TURN >= 0, 0.6 * random.normal(size=TURN.shape), 0.0)
    logp = np.where(TURN >= 0, -1 + old + 0.5 * random.normal(size=TURN.shape), 0.0)
    scores, H, wanted, masked = [2.0, -0.5, 0.0], 1.2, np.zeros(TURN.shape), 0
    for i in range(3):
        R = scores[i] if scores[i] > 0 else -1.0
        for k in range(3):
            if not (at := np.flatnonzero(TURN[i] == k)).size:
                continue
            G = 0.9 ** (TURN[i].max() - k) * R
            if np.exp(np.mean(old[i, at])) > H:
                masked += 1
                continue
            rho = np.exp(np.mean(logp[i, at] - (-1 + old[i, at])))
            wanted[i, at] = -(1.0 if R > 0 else min(rho, 1.0)) * G / 3
    assert 0 < masked < 8
    found = gradient_of(get("ipa", gamma=0.9, mismatch_limit=H), chunks(scores, old), logp)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_what_is_taken_over_is_imitated() -> None:
    """Row 1 begins with the first turn, row 2 with two turns of a success of three turns and score 2, and fails."""
    left = np.where(TURN == 0, [[0], [3], [3]], 0) + np.where(TURN == 1, [[0], [0], [2]], 0)
    batch = chunks([2.0, 0.0, 0.0], imitated=left.astype(float), imitated_score=np.array([0.0, 2.0, 2.0]))
    found = advantages(get("ipa", imitation_weight=0.5, chunk_weight=2.0), batch)
    np.testing.assert_allclose(found[0], 2 * np.array([0, 1.805, 1.805, 0, 1.9, 1.9, 0, 2]), atol=1e-6)
    np.testing.assert_allclose(found[1], [0, 0.9025, 0.9025, 0, -2, -2, 0, 0], atol=1e-6)
    np.testing.assert_allclose(found[2], [0, 0.9025, 0.9025, 0, 0.95, 0.95, 0, -2], atol=1e-6)
    # Its tokens have no importance weight, although the row fails.
    logp = np.asarray(batch.behaviour_logp) - 0.5 * (TURN >= 0)
    found = gradient_of(get("ipa"), batch, logp)
    np.testing.assert_allclose(found[2], np.array([0, -1.805, -1.805, 0, -1.9, -1.9, 0, np.exp(-0.5)]) / 3, atol=1e-6)


def test_an_episode_may_be_several_rows() -> None:
    """Rows of turns 0, 1 and 2 of one episode have the returns that they have in one row."""
    mask = np.array([[0, 1, 1], [0, 1, 1], [0, 1, 0], [0, 1, 1]], bool)
    logp = np.where(mask, -1.0, 0.0)
    rows = {"episode": np.array([0.0, 0, 0, 1]), "first_turn": np.array([1.0, 0, 2, 0])}
    batch = batch_of(mask, [1.0, 1.0, 1.0, 0.0], logp, old_logp=logp, info=rows).replace(
        turn=jnp.asarray(np.where(mask, 0, -1), jnp.int32)
    )
    found = advantages(get("ipa"), batch)
    np.testing.assert_allclose(found[:, 1], [0.95, 0.9025, 1, -1], atol=1e-6)


def test_one_chunk_that_wins_is_reinforce() -> None:
    batch, logp = random_batch(5)
    batch = batch.replace(reward=jnp.abs(batch.reward) + 0.5, old_logp=batch.behaviour_logp)
    same = np.where(np.asarray(batch.action_mask), np.nan_to_num(np.asarray(batch.reward))[:, None], 0.0)
    found = gradient_of(get("ipa", failure=None), batch, logp)
    rows = np.asarray(batch.action_mask).any(axis=1).sum()
    np.testing.assert_allclose(found, -same / rows, atol=1e-6)


def test_what_does_not_fit() -> None:
    for options in ({"gamma": 1.5}, {"failure": 0.5}, {"mismatch_limit": 0.0}, {"imitation_weight": -1.0}):
        with pytest.raises(InputError, match=next(iter(options)).replace("failure", "failures")):
            get("ipa", **options)
