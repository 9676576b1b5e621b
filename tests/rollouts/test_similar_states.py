"""States of a group with similar texts are one."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speaking import run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.program import agent, are_similar, joined, similar_states
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError


class Clocks:
    """Rooms, whose descriptions tell a time that differs from episode to episode."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.turn, self.time = 0, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return self.seen()

    def seen(self) -> Observation:
        room = ("The kitchen has a stove and two doors", "A long hallway, lit by lamps")[self.turn % 2]
        self.time += 7
        return Observation([{"role": "user", "content": f"{room}. {self.turn}:{self.time}"}], done=self.turn == 3)

    def step(self, reply: Reply) -> Observation:
        self.turn += 1
        return self.seen()


def around(outer: Any, inner: Any) -> Any:
    return outer.wrap(inner)


def keys(rollout: Any) -> list[list[int]]:
    found, _ = run_agents(rollout, tokenizer_of("plain"), lambda text, number: "go<|im_end|>", [{"prompt": "Walk."}])
    return [list(row.state_keys) for row in found.groups[0].episodes]


def test_turns_in_similar_rooms_have_one_key() -> None:
    """The first and the third turn are in the kitchen, at different times."""
    inner = agent(Clocks, turns=3)
    for plain, alike in zip(keys(inner), keys(around(similar_states(0.9), inner)), strict=True):
        assert len(set(plain)) == 3
        assert alike == [plain[0], plain[1], plain[0]]
    assert keys(around(similar_states(1.0), inner)) == keys(inner)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(states=st.lists(st.text("ab c", max_size=8), max_size=6), least=st.sampled_from([0.0, 0.5, 0.8, 1.0]))
def test_a_state_joins_the_first_that_it_is_similar_to(states: list[str], least: float) -> None:
    """By a loop over all pairs, with the ratio alone."""
    found, firsts = joined(states, least), list[str]()
    for state in states:
        ratios = [SequenceMatcher(None, first, state, autojunk=False).ratio() for first in firsts]
        wanted = next((first for first, ratio in zip(firsts, ratios, strict=True) if ratio >= least), None)
        if state not in firsts and wanted is None:
            firsts.append(state)
        assert found[state] == (state if wanted is None else wanted)


def test_the_ratio_counts_common_characters() -> None:
    """2 x 3 / (4 + 4), by hand; long texts too, in which difflib would leave frequent characters out."""
    assert are_similar("abcd", "bcde", 0.75)
    assert not are_similar("abcd", "bcde", 0.76)
    assert are_similar("a" * 500 + "b", "a" * 500 + "c", 0.99)


def test_it_goes_around_agents() -> None:
    with pytest.raises(InputError, match=r"the rollout group has none of one player: give --environment MODULE:NAME"):
        around(similar_states(), group())
    with pytest.raises(InputError, match=r"least of similar_states is 1\.5"):
        similar_states(1.5)
