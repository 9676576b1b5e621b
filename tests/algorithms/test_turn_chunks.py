"""Credit by chunks: the worked example, a loop, what is taken over from a success, and the limit of plain REINFORCE."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, gradient_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.turn_credit.ipa import restart_points
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


def test_what_is_taken_over_without_being_imitated_is_not_learnt() -> None:
    left = np.where(TURN == 0, [[0], [3], [3]], 0) + np.where(TURN == 1, [[0], [0], [-1]], 0)
    batch = chunks([2.0, 0.0, 0.0], imitated=left.astype(float), imitated_score=np.array([0.0, 2.0, 2.0]))
    found = advantages(get("ipa"), batch)
    np.testing.assert_allclose(found[2], [0, 1.805, 1.805, 0, 0, 0, 0, -1], atol=1e-6)
    ready = prepared(get("ipa"), batch.replace(old_logp=batch.old_logp - 0.25))
    drawn = np.asarray(ready.behaviour_logp)
    np.testing.assert_allclose(drawn[2], [-0.25, -1.25, -1.25, -0.25, -1.25, -1.25, -0.25, -1][:8] * (TURN[2] >= 0))


def of_group(replies: list[list[int]], scores: list[float], restarted: list[float]) -> Trajectories:
    """A group of prompt 3 whose replies are of one token."""
    turns = max(map(len, replies))
    turn = np.array([[k if k < len(one) else -1 for k in range(turns)] for one in replies])
    info = {"episode": np.arange(len(replies)), "first_turn": np.zeros(len(replies)), "restarted": np.array(restarted)}
    batch = batch_of(turn >= 0, scores, np.zeros(turn.shape), prompt_id=np.full(len(replies), 3), info=info)
    tokens = np.array([[*one, *[0] * (turns - len(one))] for one in replies])
    return batch.replace(turn=jnp.asarray(turn, jnp.int32), tokens=jnp.asarray(tokens, jnp.int32))


def told(machine: Any, state: Any, batch: Trajectories) -> Any:
    """The state of a rule of a curriculum after a step of one group, through JSON as in a checkpoint."""
    outcome: Any = SimpleNamespace(step=SimpleNamespace(scored=SimpleNamespace(batch=batch)))
    return json.loads(json.dumps({**state, **machine.observe(state, outcome)}))


def test_the_best_success_of_a_prompt_is_kept() -> None:
    facts: Any = SimpleNamespace(rows=[{}, {"t": ["a", "b"]}, {"t": []}, {}])
    machine = restart_points(stored=2, teacher="t")(facts)
    state: Any = dict(machine.start)
    state = told(machine, state, of_group([[1, 2], [3], [4]], [0.5, np.nan, -1.0], [0, 0, 0]))
    found = [one["restart"] for one in machine.columns(state, np.arange(4))]
    assert [x and (x["replies"], x["score"], x["place"]) for x in found] == [
        None, (["a", "b"], 1.0, None), None, ([[1], [2]], 0.5, None)
    ]  # fmt: skip
    state = told(machine, state, of_group([[5], [6]], [0.5, 0.4], [0, 0]))
    assert machine.columns(state, np.array([3]))[0]["restart"]["replies"] == [[1], [2]], "none is better"
    state = told(machine, state, of_group([[5], [6, 7, 8]], [0.5, 0.7], [0, 0]))
    assert machine.columns(state, np.array([3]))[0]["restart"]["replies"] == [[6], [7], [8]]
    assert machine.metrics(state) == {"restart_points": 1.0}
    few = restart_points(stored=1)(facts)
    state = {"models": {"0": {"replies": [[1]], "score": 1.0}, **state["models"]}}
    state = told(few, state, of_group([[9]], [2.0], [0]))
    assert list(state["models"]) == ["3"], "beyond one the older is forgotten"
    with pytest.raises(InputError, match="prompt 0 has 'a' in the column 't', but must have the texts"):
        restart_points(teacher="t")(SimpleNamespace(rows=[{"t": "a"}])).columns({"models": {}}, [0])  # type: ignore


def test_sequential_rollback_finds_the_crucial_chunk_and_goes_back_when_it_is_learnt() -> None:
    """A teacher of five chunks. The policy succeeds from place p on if it masters all chunks from p to the end; it
    learns a chunk when that was imitated twice. By a loop over sets of chunks."""
    machine = restart_points(stored=0, teacher="t", sequential=True)(SimpleNamespace(rows=[{"t": list("abcde")}] * 4))  # type: ignore
    state, mastered, lessons, seen = dict(machine.start), {0, 1, 3, 4}, 0, []
    for _ in range(8):
        model = machine.columns(state, np.array([3]))[0]["restart"]
        place, learnt = model["place"], model["learnt"]
        seen.append((place, learnt))
        if place > 2 and learnt > 2:
            lessons += 1
        if lessons == 2:
            mastered.add(2)
        won = mastered >= set(range(place, 5))
        state = told(machine, state, of_group([[1], [2], [3]], [0.0, won, won], [0, 1, 1]))
    # Chunk 2 cannot be done at first: from place 3 on all are, from 2 on not. After two lessons on it, it can.
    assert seen == [(4, 0), (3, 0), (2, 0), (3, 3), (2, 3), (3, 3), (2, 3), (1, 3)]
    assert machine.metrics(state) == {"restart_points": 1.0, "taken_over": 0.0}
    same = told(machine, state, of_group([[1], [2]], [0.0, 0.0], [0, 0]))
    assert same == state, "nothing restarted"


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
    with pytest.raises(InputError, match="in the column 't', which no prompt has: name another"):
        restart_points(teacher="t")(SimpleNamespace(rows=[{}, {"t": []}]))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rollback is sequential, which needs successes of earlier steps"):
        get("ipa", rollback="sequential", stored=0)
    assert get("ipa", stored=0).prompts is None
