"""Nested means over turns, and the history of a metric."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.regularisation.epo import History, phase_weight, turn_mean, with_last
from jaxrl_llm.core.trajectory import Trajectories


def batch_of(turn: list[list[int]], **fields: object) -> Trajectories:
    turns = jnp.asarray(turn)
    zeros, row = jnp.zeros(turns.shape, jnp.int32), jnp.zeros(len(turn), jnp.int32)
    known = turns >= 0
    return Trajectories(zeros, known, known, zeros * 1.0, zeros, turns, row, row, row > 0).replace(**fields)


def test_tokens_turns_and_rows_are_averaged_in_this_order() -> None:
    H = jnp.array([[0.1, 0.5, 1.5], [0.3, 0.9, 0.6]])
    assert float(turn_mean()(H, batch_of([[0, 0, 0], [0, 0, 0]]))) == pytest.approx(0.65)
    assert float(turn_mean()(H, batch_of([[0, 0, 1], [0, 0, 0]]))) == pytest.approx(0.75)
    masked = jnp.array([[0.1, 0.5, 1.5], [0.3, jnp.nan, 0.9]])
    assert float(turn_mean()(masked, batch_of([[0, 0, 1], [0, -1, 2]]))) == pytest.approx((0.9 + 0.6) / 2)
    assert float(turn_mean()(H, batch_of([[-1, -1, -1], [-1, -1, -1]]))) == 0


def test_phases() -> None:
    found = [float(phase_weight(k, 100, 2.0)) for k in (0, 25, 50, 100)]
    np.testing.assert_allclose(found, [2.0, 1.367879, 1.135335, 1.018316], atol=1e-6)


def test_a_history_begins_with_the_first_update() -> None:
    history, batch = History(jnp.float32(0), jnp.float32(0)), batch_of([[0]])
    assert with_last(history, batch, "entropy") is history
    for updates, value in [(0, 9.0), (1, 0.5), (2, 0.7)]:
        feedback = {"updates": jnp.float32(updates), "entropy": jnp.float32(value)}
        history = with_last(history, batch.replace(feedback=feedback), "entropy")
    assert tuple(map(float, history)) == pytest.approx((1.2, 2))
