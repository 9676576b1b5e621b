"""Votes, confidence and novelty against worked examples and slow loops."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, prepared, random_batch
from token_loops import agrees, doubles, group_scores

from jaxrl_llm.algorithms.exploration.ettrl import ettrl
from jaxrl_llm.algorithms.exploration.ttrl import ttrl
from jaxrl_llm.algorithms.exploration.xrpo import xrpo

pytestmark = pytest.mark.heavy

close = np.testing.assert_allclose
ANSWERS = np.array([4, 9, 9, 4, 4, 2, -1, 2, 5, 6, 5])  # groups of 4, 4, 3; the first is tied


def test_the_worked_example_of_ttrl() -> None:
    answers = np.array([12, 7, 12, -1, 7, 12, 3, 12])
    batch = batch_of(np.ones((8, 1)), np.zeros(8), np.zeros((8, 1)), info={"answer_key": answers})
    ready = prepared(ttrl(), batch)
    close(ready.reward, [1, 0, 1, 0, 0, 1, 0, 1])
    close(ready.need("majority"), np.full(8, 0.5))
    close(np.abs(ready.advantages[:, 0]), np.full(8, 0.935413), atol=1e-5)


def test_ttrl_against_a_loop() -> None:
    batch, logp = random_batch(0, info={"answer_key": ANSWERS})
    group, reward = np.asarray(batch.group), np.zeros(11)
    for g in range(3):
        rows = [i for i in range(11) if group[i] == g]
        label = collections.Counter(ANSWERS[i] for i in rows if ANSWERS[i] >= 0).most_common(1)[0][0]
        for i in rows:
            reward[i] = ANSWERS[i] == label
    A = np.broadcast_to(group_scores(reward, group)[:, None], logp.shape)
    agrees(ttrl(ties="first"), batch, logp, A, average="sequence")
    agrees(ttrl(ties="first", average="token"), batch, logp, A, average="token")
    # Two answers of a tie: one of them wins, whatever the order of the rows.
    order = np.array([3, 2, 1, 0, *range(4, 11)])
    moved = batch.replace(reward=batch.reward[order]).with_info(answer_key=jnp.asarray(ANSWERS[order]))
    one, two = (np.asarray(prepared(ttrl(), b).reward) for b in (batch, moved))
    assert set(ANSWERS[:4][one[:4] == 1]) in ({4}, {9})
    np.testing.assert_array_equal(two[:4], one[order][:4])


def test_only_some_votes_are_trained_on() -> None:
    batch, _ = random_batch(1, info={"answer_key": ANSWERS})
    ready = prepared(ttrl(keep=2, ties="first"), batch)
    kept = np.asarray(ready.loss_weights).any(axis=1)
    np.testing.assert_array_equal([kept[:4].sum(), kept[4:8].sum(), kept[8:].sum()], [2, 2, 2])
    reward = np.where(kept, np.asarray(prepared(ttrl(ties="first"), batch).reward), np.nan)
    close(ready.reward, reward)
    close(ready.advantages, group_scores(reward, batch.group)[:, None] * np.asarray(batch.action_mask), atol=1e-5)


def test_without_keys_whole_completions_vote_and_labels_are_not_read() -> None:
    batch, _ = random_batch(2)
    tokens = np.asarray(batch.tokens).copy()
    mask = np.asarray(batch.action_mask).copy()
    mask[1], tokens[1] = mask[0], np.where(mask[0], tokens[0], 50)  # the same completion, other padding
    mask[10] = False
    batch = batch.replace(tokens=jnp.asarray(tokens), action_mask=jnp.asarray(mask), token_mask=jnp.asarray(mask))
    reward = np.asarray(prepared(ttrl(), batch.replace(reward=None)).reward)
    np.testing.assert_array_equal(reward[:4], [1, 1, 0, 0])
    assert np.isnan(reward[10])
    close(np.asarray(prepared(ttrl(), batch).need("majority"))[:4], np.full(4, 0.5))


def test_the_worked_example_of_ettrl() -> None:
    H = np.array([[0.4], [0.8], [1.2], [0.6]])
    info = {"answer_key": np.array([5, 6, 7, 5])}
    batch = batch_of(np.ones((4, 1)), np.zeros(4), np.zeros((4, 1)), entropy=H, info=info)
    close(prepared(ettrl(), batch).advantages[:, 0], [1.466667, -0.933333, -0.4, 1.2], atol=5e-6)
    # One agreement of 16 cannot be a majority unless all others differ.
    keys = np.array([3, 3, *range(4, 34)])
    many = batch_of(np.ones((32, 1)), np.zeros(32), np.zeros((32, 1)), info={"answer_key": keys})
    A = prepared(ettrl("clip"), many).advantages[:, 0]
    close([A[0], A[2]], [2, -1 / np.sqrt(15)], atol=1e-5)


@pytest.mark.parametrize("clamp", [False, True])
def test_ettrl_against_a_loop(clamp: bool) -> None:
    batch, logp = random_batch(3, info={"answer_key": ANSWERS})
    mask, H, group = np.asarray(batch.action_mask), doubles(batch.entropy), np.asarray(batch.group)
    H[0] *= 4
    batch = batch.replace(entropy=jnp.float32(H))
    reward = np.asarray(prepared(ttrl(ties="first"), batch).reward)
    means = [sum(H[i, t] for t in np.flatnonzero(mask[i])) / mask[i].sum() for i in range(11)]
    Y = np.array([2 - means[i] / np.mean([means[j] for j in range(11) if group[j] == group[i]]) for i in range(11)])
    assert Y[0] < 0
    A = group_scores(reward, group, ddof=0) * (np.maximum(Y, 0) if clamp else Y)
    agrees(ettrl(ties="first", clamp=clamp), batch, logp, A[:, None] + 0 * logp, average="sequence")


def test_the_worked_example_of_xrpo() -> None:
    s = np.array([[-0.4], [-0.9], [-0.6], [-0.5]])
    batch = batch_of(np.ones((4, 1)), [1.0, 1, 0, 0], 0 * s, old_logp=s)
    A = [0.866025, 1.125207, -0.866025, -0.866025]
    close(prepared(xrpo(novelty_coefficient=1.0), batch).advantages[:, 0], A, atol=2e-6)
    assert float(prepared(xrpo(), batch).advantages[1, 0]) == pytest.approx(1.299038, abs=2e-6)


def test_xrpo_against_a_loop() -> None:
    batch, logp = random_batch(4)
    mask, old, group = np.asarray(batch.action_mask), doubles(batch.old_logp), np.asarray(batch.group)
    # Of rows that are trained on under another prompt the behaviour says nothing.
    assert not np.allclose(old, batch.behaviour_logp)
    A = group_scores(batch.reward, group, epsilon=1e-8)
    s = [sum(old[i, t] for t in np.flatnonzero(mask[i])) / mask[i].sum() for i in range(11)]
    for i in range(11):
        eta = np.exp(s[i] - np.mean([s[j] for j in range(11) if group[j] == group[i]]))
        if A[i] > 0:
            A[i] += min(max(2.5 * (1 - eta), 0), 0.5 * A[i])
    agrees(xrpo(), batch, logp, A[:, None] + 0 * logp, average="sequence", old=old)
