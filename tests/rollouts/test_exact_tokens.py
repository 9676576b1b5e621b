"""What is trained on is what was sampled, id by id: random conversations with tools, thinking and ids of no text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.compaction import keep_last
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig

ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = {
    "headers": '{"name": "add", "parameters": {"a": "r#"}}',
    "moving": '[CALLS][{"name": "add", "arguments": {"a": "r#"}}]',
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": "r#"}}\n</tool_call>'
KINDS = ("text", "bytes", "call", "malformed", "thinking")


class Watched:
    """A tokenizer that notes each text it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.own, self.encoded = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.encoded.append(text)
        return self.own(text, **options)

    def encode(self, text: str, **options: Any) -> Any:
        self.encoded.append(text)
        return self.own.encode(text, **options)


def ids_of(name: str, kind: str, random: list[int]) -> list[int]:
    """A reply with r# in it, which nothing else says. bytes: ids that no text is encoded as."""
    tokenizer, end = tokenizer_of(name), TEMPLATES[name][1]
    call = CALL.get(name, HERMES)
    text = {"call": call, "malformed": call.replace("}", ""), "thinking": "<think>\nr#\n</think>\n\nwell"}.get(
        kind, "r#"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, *(random if kind == "bytes" else []), tokenizer.convert_tokens_to_ids(end)]


@pytest.mark.parametrize("compacted", [False, True], ids=["whole", "compacted"])
@pytest.mark.parametrize("tools", [(), (ADD,)], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_training_has_the_ids_of_sampling(name: str, tools: tuple[Any, ...], compacted: bool, data: Any) -> None:
    some = st.lists(st.integers(0, 255), min_size=1, max_size=6)
    replies = [
        ids_of(name, data.draw(st.sampled_from(KINDS)), data.draw(some)) for _ in range(data.draw(st.integers(1, 4)))
    ]
    answers = [f"o{number}#" + data.draw(st.text("ab {}\n", max_size=9)) + "." for number in range(len(replies))]

    class World:
        def __init__(self, row: Mapping[str, Any]) -> None:
            self.tools, self.turn = tools, 0

        def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
            return Observation()

        def step(self, reply: Reply) -> Observation:
            said, self.turn = answers[self.turn], self.turn + 1
            told: list[dict[str, Any]] = [{"role": "tool", "name": one.name, "content": said} for one in reply.calls]
            return Observation(told or [{"role": "user", "content": said}], done=self.turn == len(replies))

    tokenizer, drawn = Watched(tokenizer_of(name)), list[list[int]]()

    def says(text: str, sample: int) -> list[int]:
        drawn.append(replies[len(drawn)])
        return drawn[-1]

    limits: Any = (
        {"context_tokens": 700 if tools else 300, "turn_tokens": 120, "compact": keep_last(1)} if compacted else {}
    )
    rollout = agent(World, **limits)
    found, engines = run_agents(rollout, tokenizer, says, [{"prompt": "q#"}], samples=1, limit=400)
    (one,) = found.groups
    assert not one.failed
    rows, batch = one.episodes, to_batch(found.groups, SamplingConfig(), 0)
    action = np.asarray(batch.action_mask)

    # Every sampled id is an action, in order, and nothing else is; log-probabilities are at their places.
    assert [int(i) for row, mask in zip(batch.tokens, action, strict=True) for i in row[mask]] == [
        i for ids in drawn for i in ids
    ]
    np.testing.assert_array_equal(np.asarray(batch.turn) >= 0, action)
    np.testing.assert_array_equal(np.asarray(batch.behaviour_logp), np.where(action, -1.0, 0.0))
    turns = [row.own.token[row.turns == turn].tolist() for row in rows for turn in range(int(row.turns.max()) + 1)]
    assert turns == drawn

    # What the engine was asked to go on from is the row up to that place.
    asked = [request for engine in engines for request in engine.requests]
    assert len(asked) == len(drawn)
    by_sample = {row.sample: row.tokens for row in rows}
    for request, ids in zip(asked, drawn, strict=True):
        before = (*request.prompt, *request.begun.token.tolist())
        assert by_sample[request.sample][: len(before) + len(ids)] == (*before, *ids)

    # What was sampled is encoded in prompts of new rows alone, and all that an answer has is encoded for its row.
    new = [text for text in tokenizer.encoded if "q#" in text]
    assert len(new) == len(rows) if not compacted else len(new) >= len(rows)
    assert not any("r#" in text for text in tokenizer.encoded if "q#" not in text)
    for number in range(len(drawn) - 1):
        assert any(f"o{number}#" in text for text in tokenizer.encoded)
