"""Episodes that are tried again from a turn: their tokens, environments, masks, and what is trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.algorithms.agents.r3l import reflecting
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.agents.restarts import Reflection, reflection_in
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["plain"][1]


class Doors:
    """Three doors; its reward is the share of replies that are "right". Over after three replies."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.said: list[str] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": "door 0"}])

    def step(self, reply: Reply) -> Observation:
        self.said.append(str(reply.message["content"]))
        said = f"door {len(self.said)} after {self.said[-1]}"
        return Observation([{"role": "user", "content": said}], done=len(self.said) == 3)

    def close(self) -> float:
        return self.said.count("right") / 3


class Other(Doors):
    """Each one says something else, so that no replay answers the same."""

    made = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        Other.made += 1
        return Observation([{"role": "user", "content": f"door {Other.made}"}])


def speaker(reflection: Any) -> Any:
    """Says left at door 1 and later, unless it was told otherwise, and the reflection when it is asked for one."""

    def says(text: str, sample: int) -> str:
        if "JSON" in text.rpartition("<|im_start|>user")[2]:
            return (reflection if isinstance(reflection, str) else json.dumps(reflection)) + END
        return ("right" if "door 0" in text.rpartition("user")[2] or "go right" in text else "left") + END

    return says


async def environment_reward(task: Any, episodes: Any) -> list[Episode]:
    return [episode.scored(episode.rewards["environment"]) for episode in episodes]


def played(
    monkeypatch: pytest.MonkeyPatch, reflection: Any, samples: int = 2, environment: Any = Doors,
    **settings: Any,
) -> tuple[list[Episode], list[Any], Any]:  # fmt: skip
    monkeypatch.setattr("speaking.by_length", environment_reward)
    rollout = reflecting(**settings.pop("options", {})).wrap(agent(environment, turns=3, **settings))  # type: ignore[misc]
    found, engines = run_agents(
        rollout, tokenizer_of("plain"), speaker(reflection), [{"prompt": "Choose."}], samples, limit=400
    )
    return list(found.groups[0].episodes), engines[0].requests, found


def words(row: Episode, trained: bool = True) -> str:
    prompt = row.trained_prompt if trained and row.trained_prompt is not None else row.prompt
    return str(tokenizer_of("plain").decode([*prompt, *row.own.token.tolist()]))


ADVICE = {"outcome": "failed", "step": 1, "suggestion": "go right"}


def test_a_retry_goes_on_from_its_step_and_is_trained_on_without_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, requests, found = played(monkeypatch, ADVICE)
    first, retry, reflection, told = rows
    assert [row.part for row in rows] == [0, 0, 1, 2]
    assert [row.reward for row in rows] == pytest.approx([1 / 3, 1.0, 1.0, 1.0])
    assert [row.info["pivot"] for row in rows] == [1.0, 1.0, 0.0, 1.0]
    assert [row.info["guided"] for row in rows] == [0.0, 1.0, 0.0, 1.0]
    assert [row.info["off_prompt"] for row in rows] == [0.0, 1.0, 0.0, 0.0]
    # The prompt and observations are the same; the replies after the pivot are others.
    assert words(retry) == words(first).replace("left", "right")
    assert "go right" not in words(retry)
    assert words(told).count("go right") == 1
    shown = words(told).index("go right")
    assert words(told).index("right<|im_end|>") < shown < words(told).index("door 1 after right"), "at its step"
    # What is trained on was drawn with the advice in its context: the engine saw just these tokens.
    asked = {tuple([*one.prompt, *one.begun.token.tolist()]) for one in requests}
    sampled = [
        at for at, (turn, after) in enumerate(zip(told.turns, told.turns[1:], strict=False)) if after > max(turn, 0)
    ]
    assert len(sampled) == 2
    assert all(told.tokens[: len(told.prompt) + at + 1] in asked for at in sampled)
    for row, other in ((retry, told),):
        np.testing.assert_array_equal(row.own.token[row.actions], other.own.token[other.actions])
        np.testing.assert_array_equal(row.own.logp[row.actions], other.own.logp[other.actions])
    # The reflection has seen the attempt, and is what the policy said.
    assert json.loads(tokenizer_of("plain").decode(reflection.own.token.tolist()).removesuffix(END)) == ADVICE
    assert "Step 2\nuser: door 2 after left\nreply: left\nuser: door 3 after left\nReward: 0.333333" in words(
        reflection
    )
    assert "Step 0\nuser: Choose.\n\ndoor 0\nreply: right" in words(reflection)
    batch = to_batch(found.groups, SamplingConfig(), 0)
    assert np.asarray(batch.group).tolist() == [0, 0, 1, 2]
    assert np.asarray((batch.info or {})["first_turn"])[:2].tolist() == [0, 0]


def test_from_the_first_step_the_prompt_has_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    first, retry, _, told = played(monkeypatch, {**ADVICE, "step": 0})[0]
    assert retry.trained_prompt == first.prompt != retry.prompt
    assert told.trained_prompt is None
    assert told.prompt == retry.prompt
    assert "go right\n\nChoose." in words(told)
    assert [row.info["pivot"] for row in (first, retry, told)] == [0.0] * 3
    assert [row.info["off_prompt"] for row in (first, retry, told)] == [0.0, 1.0, 0.0]


def test_rows_that_begin_after_the_pivot_have_the_advice_in_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each turn has a prompt of its own."""
    rows = played(monkeypatch, ADVICE, fresh=True)[0]
    first, retry = ([row for row in rows if row.part == 0 and row.info["guided"] == g] for g in (0.0, 1.0))
    told = [row for row in rows if row.part == 2]
    assert [row.info["first_turn"] for row in first] == [0, 1, 2]
    assert [row.info["first_turn"] for row in retry] == [1, 2], "what comes before is not trained on"
    for row, plain, with_advice in zip(retry, first[1:], told, strict=True):
        assert row.trained_prompt is not None
        assert "go right" in words(row, trained=False)
        assert words(row).replace("right", "") == words(plain).replace("left", "").replace("right", "")
        assert with_advice.trained_prompt is None
        assert with_advice.prompt == row.prompt
        assert row.info["pivot"] == plain.info["pivot"] == 1


@pytest.mark.parametrize(
    "reflection",
    ["no idea", {"outcome": "failed", "step": 3, "suggestion": "go right"}, {"outcome": "perfect"}],
    ids=["unreadable", "no such step", "perfect"],
)
def test_without_a_retry_the_group_keeps_its_size(reflection: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(monkeypatch, reflection, 5)[0]
    assert len(rows) == 5
    assert len({row.sample for row in rows}) == 5
    assert [row.info["pivot"] for row in rows] == [0.0] * 5
    said = [row.info.get("reflected") for row in rows]
    assert said == [float(reflection == {"outcome": "perfect"})] * 2 + [None] * 3
    plain, _ = run_agents(
        agent(Doors, turns=3), tokenizer_of("plain"), speaker(""), [{"prompt": "Choose."}], 5, limit=400
    )
    assert [row.tokens for row in rows] == [row.tokens for row in plain.groups[0].episodes], "as agents, token by token"


def test_a_perfect_episode_adds_a_reflection_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"full_reward": 0.3}
    rows = played(monkeypatch, {"outcome": "perfect"}, options=options)[0]
    assert [(row.part, row.reward) for row in rows] == [(0, pytest.approx(1 / 3)), (0, pytest.approx(1 / 3)), (1, 0.3)]
    # A retry that gains nothing adds nothing.
    same = {"outcome": "improvable", "step": 1, "suggestion": "stay"}
    assert [row.part for row in played(monkeypatch, same, options=options)[0]] == [0, 0]


def test_an_environment_that_cannot_be_replayed_costs_the_retry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = played(monkeypatch, ADVICE, environment=Other)[0]
    assert [row.info["guided"] for row in rows] == [0.0, 0.0]
    assert [row.info["pivot"] for row in rows] == [0.0, 0.0]
    assert "is an episode of its own" in caplog.text


def test_reflections_are_read() -> None:
    said = 'Let me see. {"outcome": "improvable", "step": 2, "suggestion": " turn "} Done.'
    assert reflection_in(said, 3) == Reflection(False, 2, "turn")
    assert reflection_in('{"outcome": "perfect"}', 0) == Reflection(True)
    wrong = ["", "{", "[1]", "{}", '{"outcome": "good"}', '{"outcome": "failed", "step": true, "suggestion": "x"}']
    wrong += [
        '{"outcome": "failed", "step": -1, "suggestion": "x"}',
        '{"outcome": "failed", "step": 0, "suggestion": " "}',
    ]
    assert [reflection_in(text, 3) for text in wrong] == [None] * len(wrong)


def test_it_is_for_agents() -> None:
    made = reflecting()
    assert made.wrap is not None
    with pytest.raises(InputError, match="the rollout group has none"):
        made.wrap(group())
    assert made.wrap(agent(Doors)).rows(4) == 8
    with pytest.raises(InputError, match="reflection_tokens"):
        reflecting(reflection_tokens=0)
