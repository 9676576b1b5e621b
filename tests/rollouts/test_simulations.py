"""Replies that are written again after a simulation: what the policy sees, what goes on, and what is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.algorithms.agents.dyna_grpo import planned_actions, simulating
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["plain"][1]
NUMBERS = "abc"


class Rooms:
    """It says all actions so far, of each the first word; over after three. Its reward is how many of them are "b"."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.done: list[str] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": "room"}])

    def step(self, reply: Reply) -> Observation:
        self.done.append(str(reply.message["content"]).split()[0])
        return Observation([{"role": "user", "content": "room " + "".join(self.done)}], done=len(self.done) == 3)

    def close(self) -> float:
        return float(self.done.count("b"))


class Locked(Rooms):
    """It can be neither copied nor replayed."""

    made = 0

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        Locked.made += 1
        self.number, self.lock = Locked.made, (x for x in ())

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": f"room {self.number}"}])


def says(text: str, sample: int) -> str:
    """Action a with two more, or b when it was told what these lead to."""
    return ("b" if "tried out" in text.rpartition("<|im_start|>user")[2] else "a <plan>c\n2. d</plan>") + END


async def environment_reward(task: Any, episodes: Any) -> list[Episode]:
    return [episode.scored(episode.rewards["environment"]) for episode in episodes]


def played(
    monkeypatch: pytest.MonkeyPatch, environment: Any = Rooms, step: int = 1, samples: int = 2, **options: Any
) -> tuple[list[Episode], list[Any], Any]:
    monkeypatch.setattr("speaking.by_length", environment_reward)
    rollout = simulating(**options).wrap(agent(environment, turns=3))  # type: ignore[misc]
    flight = (GroupLog((1,), 0, samples, step),)
    found, engines = run_agents(rollout, tokenizer_of("plain"), says, [{"prompt": "Go."}], samples, flight=flight)
    return list(found.groups[0].episodes), engines[0].requests, found


def text_of(ids: Any) -> str:
    return str(tokenizer_of("plain").decode(list(ids)))


def test_an_episode_goes_on_with_the_refined_reply_and_is_trained_on_as_it_went_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, requests, found = played(monkeypatch)
    assert [row.info["refined"] for row in rows] == [0, 0, 1, 1]
    assert [row.reward for row in rows] == [0, 0, 3, 3]
    assert [row.info["off_prompt"] for row in rows] == [0, 0, 1, 1]
    ordinary, refined = text_of(rows[0].tokens), text_of(rows[2].tokens)
    assert refined == ordinary.replace("a <plan>c\n2. d</plan>", "b").replace("aa", "bb").replace("ba", "bb").replace(
        "room a", "room b"
    )
    assert "tried out" not in refined
    # What the policy saw before its second reply: the state that it is in, its plan, and the three states after it.
    asked = [text_of([*one.prompt, *one.begun.token.tolist()]) for one in requests]
    seen = [text for text in asked if "tried out" in text]
    assert len(seen) == 6
    assert {text.count("<plan>") for text in seen} == {1}, "the first replies of earlier turns are gone"
    second = next(text for text in seen if "room b<" in text)
    for number, state in enumerate(("ba", "bac"), start=1):
        assert f"After action {number}: room {state}" in second
    assert "After action 2: room bac The episode is over." in second
    assert "After action 3" not in second, "it is over before"
    first = next(text for text in seen if "room b" not in text)
    assert "After action 3: room acd The episode is over." in first
    # The tokens are those that were sampled, with their own log-probabilities; the support is not known there.
    np.testing.assert_array_equal(rows[2].own.logp[rows[2].actions], -1.0)
    assert np.isneginf(rows[2].own.floor[rows[2].actions]).all()
    batch = to_batch(found.groups, SamplingConfig(), 0)
    assert np.asarray(batch.group).tolist() == [0] * 4
    assert np.asarray(batch.turn).max() == 2


def test_kept_states_are_in_the_prompts_of_single_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(monkeypatch, revealed="kept")[0]
    assert len(rows) == 2 + 6
    kept = rows[2:5]
    assert [row.info["first_turn"] for row in kept] == [0, 1, 2]
    assert len({row.info["episode"] for row in kept}) == 1
    for row in kept:
        assert row.info["off_prompt"] == 0
        assert row.reward == 3
        assert "tried out" in text_of(row.prompt)
        assert text_of(row.own.token) == "b" + END
        assert row.actions.all()


def test_depth_bounds_the_simulation_and_phases_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = played(monkeypatch, depth=1)[1]
    seen = [text for one in requests if "tried out" in (text := text_of([*one.prompt, *one.begun.token.tolist()]))]
    assert all("After action 1" in text and "After action 2" not in text for text in seen)
    sizes = [len(played(monkeypatch, step=step, policy_steps=2, simulation_steps=1)[0]) for step in range(4)]
    assert sizes == [2, 2, 4, 2]
    assert len(played(monkeypatch, step=5, simulation_steps=0)[0]) == 2


def test_ordinary_episodes_are_those_of_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(monkeypatch, step=0, samples=3)[0]
    plain, _ = run_agents(agent(Rooms, turns=3), tokenizer_of("plain"), says, [{"prompt": "Go."}], 3)
    assert [row.tokens for row in rows] == [row.tokens for row in plain.groups[0].episodes]


def test_an_environment_that_cannot_be_copied_leaves_the_reply(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = played(monkeypatch, Locked)[0]
    assert [row.reward for row in rows] == [0] * 4
    assert "a reply of sample 2 is not refined" in caplog.text


def test_plans_are_read() -> None:
    assert planned_actions("x <plan>\n 1) a\n- b\n\n* c </plan>", 9) == ["a", "b", "c"]
    assert planned_actions("x <plan>a\nb</plan>", 1) == ["a"]
    assert planned_actions("x <plan>a\nb</plan>", 0) == []
    assert planned_actions("x <plan>a", 4) == planned_actions("", 4) == []


def test_it_is_for_agents() -> None:
    made = simulating()
    assert made.wrap is not None
    with pytest.raises(InputError, match="the rollout group has none"):
        made.wrap(group())
    assert made.wrap(agent(Rooms)).rows(4) == 8
    assert simulating(revealed="kept").wrap(agent(Rooms, turns=3)).rows(4) == 16  # type: ignore[misc]
