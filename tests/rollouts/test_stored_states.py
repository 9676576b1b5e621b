"""Stored states: what the curriculum keeps and draws, and that the policy replies at them with the exact tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of
from test_probes import Saying

from jaxrl_llm.algorithms.turn_credit.archer import COLUMN, kept_states, replying_at_stored_states
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

ROWS = [{"prompt": str(i)} for i in range(5)]


def step_of(tokens: Any, turn: Any, reward: Any, anew: Any = None) -> Any:
    """What the curriculum reads of a step; tokens of 0 are padding."""
    tokens = np.asarray(tokens)
    info = None if anew is None else {"resampled": np.asarray(anew, np.float32)}
    batch = SimpleNamespace(
        tokens=tokens, token_mask=tokens > 0, turn=np.asarray(turn), need=lambda name: np.asarray(reward), info=info,
        prompt_id=np.arange(len(tokens)),
    )  # fmt: skip
    return SimpleNamespace(scored=SimpleNamespace(batch=batch), sampled=None)


# Two turns after a prompt of two tokens, with an observation; one turn, left-padded; no score; a reply drawn anew.
TOKENS = [[1, 2, 3, 4, 5, 6], [0, 7, 8, 9, 0, 0], [1, 1, 1, 1, 0, 0], [2, 2, 2, 2, 0, 0]]
TURN = [[-1, -1, 0, 0, -1, 1], [-1, -1, -1, 0, -1, -1], [-1, 0, 0, 0, -1, -1], [-1, 0, 0, 0, -1, -1]]
STEP = step_of(TOKENS, TURN, [1.0, 0.0, math.nan, 0.5], [0, 0, 0, 1])
STATES = [([1, 2], []), ([1, 2], [3, 4, 5]), ([7, 8], [])]


def shown(curriculum: Any, state: Any, count: int) -> list[Any]:
    """The states of so many rows, each a pair of lists."""
    return [one[COLUMN] for one in curriculum.columns(state, np.arange(count, dtype=np.int32))]


def test_states_are_those_before_turns_of_scored_rows() -> None:
    curriculum = in_epochs(kept_states(3))(ROWS, 0)
    empty = curriculum.init()
    assert shown(curriculum, empty, 2) == [[], []]
    state = curriculum.observe(empty, STEP)
    assert sorted(shown(curriculum, state, 1)[0]) == sorted(STATES)
    assert len(empty["rule0_places"]) == 0, "a state is not changed"
    assert curriculum.metrics(state) == {"curriculum/states": 3.0}
    first, second = shown(curriculum, state, 2)
    assert (len(first), len(second)) == (2, 1), "each once, in turn"
    assert sorted([*first, *second]) == sorted(STATES)
    assert len(shown(in_epochs(kept_states(1))(ROWS, 0), state, 2)[0]) == 1


def test_it_draws_uniformly_and_the_newest_rows_stay() -> None:
    curriculum = in_epochs(kept_states(1, episodes=3))(ROWS, 0)
    state, drawn = curriculum.init(), []
    for number in range(300):
        state = curriculum.observe(state, step_of([[100 + number, 5]], [[-1, 0]], [1.0]))
        (one,) = shown(curriculum, state, 1)
        drawn.append(number - (one[0][0][0] - 100))
        assert len(state["rule0_lengths"]) == min(number + 1, 3)
    assert set(drawn) == {0, 1, 2}
    assert all(70 < drawn.count(age) < 130 for age in range(3))


def test_it_goes_on_from_a_checkpoint_and_draws_shuffled_epochs() -> None:
    curriculum, plain = in_epochs(kept_states(2))(ROWS, 3), shuffled_epochs(ROWS, 3)
    state, other = curriculum.init(), plain.init()
    for _ in range(3):
        ids, state = curriculum.select(state, 3)
        expected, other = plain.select(other, 3)
        np.testing.assert_array_equal(ids, expected)
        state = curriculum.observe(state, STEP)
        kept, arrays = saved(ExperienceState(state, {}, (), Drafts()))
        again = loaded(kept, arrays).curriculum
        assert shown(curriculum, again, 2) == shown(curriculum, state, 2)
        state = again


def test_the_policy_replies_at_them() -> None:
    """As in the conversation: the same state gives the same reply, which the environment does not hear."""
    tokenizer, end = tokenizer_of("plain"), TEMPLATES["plain"][1]
    rollout = replying_at_stored_states(4)
    assert rollout.wrap is not None

    def says(text: str, sample: int) -> str:
        return f"{len(text)}" + end

    plain, _ = run_agents(agent(Saying, turns=3), tokenizer, says, [{"prompt": "Go."}])
    batch = to_batch(plain.groups, SamplingConfig(), 0)
    reward = np.ones(len(batch.tokens))
    curriculum = in_epochs(kept_states(4))(ROWS, 0)
    state = curriculum.observe(curriculum.init(), SimpleNamespace(
        scored=SimpleNamespace(batch=batch.replace(reward=reward)), sampled=None
    ))  # fmt: skip
    row = {"prompt": "Go.", **curriculum.columns(state, np.zeros(1, np.int32))[0]}
    found, _ = run_agents(rollout.wrap(agent(Saying, turns=3)), tokenizer, says, [row])
    whole = to_batch(found.groups, SamplingConfig(), 0)
    anew = np.asarray(whole.info["resampled"]) > 0
    assert anew.tolist() == [False, False, True, True, True, True]
    assert len(set(np.asarray(whole.group)[anew])) == 1
    assert not set(np.asarray(whole.group)[anew]) & set(np.asarray(whole.group)[~anew])
    assert np.isnan([one.reward for one in found.groups[0].episodes if one.info["resampled"]]).all()
    of_before = [
        row[mask].tolist() for row, mask in zip(np.asarray(batch.tokens), np.asarray(batch.token_mask), strict=True)
    ]
    for tokens, mask, turn in zip(
        *(np.asarray(x)[anew] for x in (whole.tokens, whole.token_mask, whole.turn)), strict=True
    ):
        own = tokens[mask].tolist()
        assert set(turn[mask].tolist()) == {-1, 0}
        assert any(path[: len(own)] == own for path in of_before)
    again = rollout.wrap(agent(Saying, turns=3))
    assert again.rows(2) == 6
    assert "resampled" in again.provides


def test_numbers_are_checked() -> None:
    for make in (kept_states, replying_at_stored_states):
        with pytest.raises(InputError, match="is -1"):
            make(-1)
