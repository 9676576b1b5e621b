"""Vines, samples of a group that go on from states that its first episode visited; profiles of turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_restarts import Forgetful, Summing, replies, rows_of

from jaxrl_llm.algorithms.score_function.polychromic import polychromic, vines
from jaxrl_llm.algorithms.turn_credit.trloo import profiled
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.utils.errors import InputError


def around(rollout: Any, inner: Any) -> Any:
    return rollout.wrap(inner)


@pytest.mark.parametrize("window", [None, 1])
def test_vines_begin_in_copies_of_the_same_states(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample n always says n + 1, so that what a vine took over is sample 0's."""
    rows = rows_of(monkeypatch, around(vines(2, window), agent(Summing)), {}, 5)
    said = [replies(row) for row in rows]
    begins = [next(t for t in range(4) if one[t] != 1) for one in said[1:]]
    assert begins[0] == begins[2] < begins[1] == begins[3]
    assert said == [[1] * 4, *([1] * t + [n + 2] * (4 - t) for n, t in enumerate(begins))]
    assert [row.reward for row in rows] == [sum(one) for one in said]  # of an environment that heard them
    end = 4 if window is None else window
    for number, row in enumerate(rows):
        first, state = (begins[number - 1], 2 - number % 2) if number else (0, 0)
        mark = [0 if t < 0 or not number else -1 if t < first else state if t < first + end else 0 for t in row.turns]
        assert np.asarray(row.info["vine"]).tolist() == mark


def test_without_copies_they_are_episodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch, around(vines(1), agent(Forgetful)), {}, 3)
    assert not any(np.asarray(row.info["vine"]).any() for row in rows[1:] if replies(row)[0] != 1)
    assert [replies(row)[-1] for row in rows] == [1, 2, 3]


class Measured(Summing):
    """It says how large the reply was, but for the last one."""

    def step(self, reply: Reply) -> Observation:
        seen, said = super().step(reply), int(str(reply.message["content"]))
        return replace(seen, info={} if seen.done else {"size": said / 8 + self.turns})


def test_numbers_of_observations_are_on_the_tokens_of_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch, around(profiled("size"), agent(Measured)), {}, 2)
    for number, row in enumerate(rows):
        expected = [(number + 1) / 8 + t + 1 if 0 <= t < 3 else np.nan for t in row.turns]
        np.testing.assert_array_equal(row.info["profile"], expected)


def test_a_group_has_room_for_its_vines() -> None:
    method = polychromic(states=2)
    assert method.rollout is not None
    assert around(method.rollout, agent(Summing)).demands.min_samples == 5
    assert polychromic().rollout is None
    with pytest.raises(InputError, match="the episodes of agents have vines, but the rollout group has none"):
        around(method.rollout, polychromic(states=2).rollout)
