"""Turns as token ids: deltas of the chat templates of several families, and replies read as messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, tokenizer_of

from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.utils.errors import InputError

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ASKED = [{"role": "user", "content": "so?"}]
APPENDING = [*TEMPLATES]
CALLS = {
    "plain": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
    "thinking": '<think>\nadd\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    "<|im_end|>",
    "headers": '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>',
    "alternating": '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><end_of_turn>',
    "moving": '[CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}}]</s>',
}


def turns_of(name: str, *tools: Any) -> ChatTurns:
    return ChatTurns(tokenizer_of(name), tools)


@pytest.mark.parametrize("name", APPENDING)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_deltas_are_what_the_template_writes(name: str, data: Any) -> None:
    """Conversations of plain replies, grown turn by turn, are as the template renders them whole."""
    words = st.text("abc .,\n{}", min_size=1).map(lambda text: f"x{text}x")
    turns, end = turns_of(name), TEMPLATES[name][1]
    messages = [{"role": "user", "content": data.draw(words)}]
    ids = turns.begin(messages)
    for _ in range(data.draw(st.integers(1, 3))):
        reply, answer = data.draw(words), data.draw(words)
        sampled = turns.encode(reply + end)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
        more = turns.bridge(messages[-1:], sampled[-1])
        assert more is not None
        ids = [*ids, *sampled, *more]
    assert turns.tokenizer.decode(ids) == turns.render(messages)
    assert ids == turns.encode(turns.render(messages))


@pytest.mark.parametrize("name", APPENDING)
def test_calls_and_their_results(name: str) -> None:
    turns = turns_of(name, ADD)
    reply = turns.reading.text(CALLS[name])
    assert [tuple(call) for call in reply.calls] == [("add", {"a": 2, "b": 3})]
    assert reply.fault is None
    assert not reply.message["content"].strip()
    assert (reply.message.get("reasoning_content", "").strip() == "add") == (name == "thinking")
    sampled = turns.encode(CALLS[name])
    more = turns.bridge([{"role": "tool", "content": "found 5"}], sampled[-1])
    assert more is not None
    assert "found 5" in turns.tokenizer.decode(more)
    role = {"plain": "user", "hermes": "user", "thinking": "user", "headers": "ipython", "alternating": "user"}
    assert role.get(name, "[RESULT]") in turns.tokenizer.decode(more)
    assert turns.tokenizer.decode(more).endswith(turns.reply_start)


@pytest.mark.parametrize("name", ["plain", "hermes", "thinking", "headers", "alternating"])
def test_several_results(name: str) -> None:
    turns = turns_of(name, ADD)
    more = turns.bridge([{"role": "tool", "content": "41"}, {"role": "tool", "content": "42"}], None)
    assert more is not None
    text = turns.tokenizer.decode(more)
    assert text.index("41") < text.index("42")
    assert text.endswith(turns.reply_start)


@pytest.mark.parametrize("name", APPENDING)
def test_a_reply_that_was_cut_is_ended(name: str) -> None:
    turns, end = turns_of(name), TEMPLATES[name][1]
    asked, said = [{"role": "user", "content": "so?"}], turns.encode("well")
    cut = turns.bridge(asked, said[-1])
    whole = turns.bridge(asked, turns.encode(end)[-1])
    assert cut is not None
    assert whole is not None
    assert turns.tokenizer.decode(cut) == end + turns.tokenizer.decode(whole)


def test_a_template_that_moves_the_tools_does_not_append() -> None:
    asked = [{"role": "user", "content": "and then?"}]
    last = turns_of("moving").encode("</s>")[-1]
    assert turns_of("moving", ADD).bridge(asked, last) is None
    assert turns_of("moving").bridge(asked, last) is not None, "without tools nothing moves"


def test_a_reply_with_another_end_does_not_append() -> None:
    turns = turns_of("plain")
    turns.tokenizer.eos_token = "</s>"
    asked = [{"role": "user", "content": "so?"}]
    assert turns.bridge(asked, turns.encode("</s>")[-1]) is None
    assert turns.bridge(asked, turns.encode("<|im_end|>")[-1]) is not None


def test_tools_are_described_where_the_template_does_not() -> None:
    turns, asked = turns_of("alternating", ADD), [{"role": "system", "content": "Be brief."}, *ASKED]
    text = turns.tokenizer.decode(turns.begin(asked))
    assert text.index("Be brief.") < text.index("Add two numbers.") < text.index("<tool_call>")
    assert "<tool_call>" not in turns.tokenizer.decode(turns_of("alternating").begin(ASKED))


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("<tool_call>\n{oh}\n</tool_call><|im_end|>", "JSON"),
        ("<tool_call>\n[1]\n</tool_call><|im_end|>", "name"),
        ('<tool_call>\n{"name": "add", "arguments": 3}\n</tool_call><|im_end|>', "arguments of add"),
    ],
)
def test_a_malformed_call_says_why(said: str, fault: str) -> None:
    reply = turns_of("hermes", ADD).reading.text(said)
    assert reply.calls == ()
    assert reply.message["content"] == said
    assert reply.fault is not None
    assert fault in reply.fault


def test_the_next_turn_has_messages() -> None:
    with pytest.raises(InputError, match="the next turn has no messages"):
        turns_of("plain").bridge([], None)
