"""Environments that tell the whole conversation anew: it goes on where it begins with what was said."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from speaking import run_agents

sys.path.append(str(Path(__file__).parents[1]))

from family_templates import sampled, tokenizer_of_family

from jaxrl_llm.data.chat.calls import Message, Reply
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents import agent
from jaxrl_llm.rollouts.agents.messages import messages_after

SYSTEM, ASKED, MORE = (
    {"role": role, "content": text} for role, text in (("system", "s"), ("user", "q"), ("user", "m"))
)


class Whole:
    """Tells the whole conversation each time; the policy's reply as it was, or changed."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, changed: bool) -> None:
        self.changed, self.said = changed, [SYSTEM, ASKED]

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([*self.said], whole=True)

    def step(self, reply: Reply) -> Observation:
        assert reply.tokens > 0
        assert reply.prompt_tokens > 0
        if len(self.said) > 2:
            return Observation(done=True)
        text = "changed" if self.changed else f" {reply.message['content']}\n"
        self.said += [{"role": "assistant", "content": text}, MORE]
        return Observation([*self.said], whole=True)

    def close(self) -> float:
        return 1.0


@pytest.mark.parametrize("changed", [False, True])
def test_what_was_said_goes_on_and_what_was_changed_begins_a_row(changed: bool) -> None:
    tokenizer = tokenizer_of_family("Qwen 3")
    turns = ChatTurns(tokenizer)
    replies = [sampled(turns, text, calls=False) for text in ("One.", "Two.")]
    found, _ = run_agents(
        agent(lambda row: Whole(changed), turns=3), tokenizer, lambda text, sample: replies[text.count("m<")],
        [{"prompt": "of the row, which the environment replaces"}], limit=60, ends=turns.stops,
    )  # fmt: skip
    (group,) = found.groups
    assert not group.failed
    rows = [one for one in group.episodes if one.info["episode"] == group.episodes[0].info["episode"]]
    assert len(rows) == 1 + changed
    assert rows[0].prompt == tuple(turns.begin([SYSTEM, ASKED]))
    said = [one.own.token[one.turns == turn].tolist() for one in rows for turn in range(2) if (one.turns == turn).any()]
    assert said == replies
    if changed:
        assert rows[1].prompt == tuple(turns.begin([SYSTEM, ASKED, {"role": "assistant", "content": "changed"}, MORE]))
        assert rows[1].info["new_rows"] == 1


def test_what_counts_as_said() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    told = {**call, "id": "2", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said: list[Message] = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}]
    result = {"role": "tool", "content": "5", "tool_call_id": "2"}
    whole: list[Message] = [ASKED, {"role": "assistant", "content": None, "tool_calls": [told]}, result]
    assert messages_after(said, whole) == [result]
    assert messages_after(said, whole[:2]) is None
    other = {**told, "function": {"name": "f", "arguments": '{"x": 2}'}}
    assert messages_after(said, [ASKED, {**whole[1], "tool_calls": [other]}, result]) is None
    broken = {**told, "function": {"name": "f", "arguments": '{"x": '}}
    assert messages_after(said, [ASKED, {**whole[1], "tool_calls": [broken]}, result]) is None
