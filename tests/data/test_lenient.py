"""Calls in replies that are not quite as they should be: what was meant is read, and a broken call takes no other."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import tokenizer_of

from jaxrl_llm.data.chat.lenient import CallFormat, ReadCall, read_calls, read_lenient_json
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.tools.base import Toolbox

HERMES = CallFormat("<tool_call>", "</tool_call>")
LIST = CallFormat("[CALLS]", "", is_list=True)
BARE = CallFormat("", "")
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"


def written(name: str, arguments: str) -> str:
    """A call as JSON, with arguments as they are."""
    return f'{{"name": "{name}", "arguments": {arguments}}}'


READ: dict[str, tuple[str, CallFormat, list[tuple[str, Any]], int]] = {
    "as it should be": (OPEN + written("run", '{"code": "1"}') + CLOSE, HERMES, [("run", {"code": "1"})], 0),
    "raw line breaks": (OPEN + written("run", '{"code": "a\nb"}') + CLOSE, HERMES, [("run", {"code": "a\nb"})], 1),
    "a raw tab": (OPEN + written("run", '{"code": "a\tb"}') + CLOSE, HERMES, [("run", {"code": "a\tb"})], 1),
    "an escape that JSON lacks": (
        OPEN + written("find", r'{"p": "\d+\."}') + CLOSE, HERMES, [("find", {"p": r"\d+\."})], 1
    ),
    "both": (OPEN + written("find", '{"p": "\\d\n"}') + CLOSE, HERMES, [("find", {"p": "\\d\n"})], 1),
    "as models of Llama write it": (
        '<|python_tag|>{"type": "function", "name": "run", "parameters": {"a": 1}}', BARE, [("run", {"a": 1})], 0
    ),
    "no closing tag": (OPEN + written("run", '{"code": "1"}'), HERMES, [("run", {"code": "1"})], 1),
    "no closing tag, then another": (
        OPEN + written("a", "{}") + "\n" + OPEN + written("b", "{}") + CLOSE, HERMES, [("a", {}), ("b", {})], 1
    ),
    "a closing tag in an argument": (
        OPEN + written("run", '{"code": "</tool_call>"}') + CLOSE, HERMES, [("run", {"code": "</tool_call>"})], 0
    ),
    "an opening tag in an argument": (
        OPEN + written("run", '{"code": "<tool_call>"}') + CLOSE, HERMES, [("run", {"code": "<tool_call>"})], 0
    ),
    "arguments as text": (
        OPEN + written("run", json.dumps('{"p": "\\d"}')) + CLOSE, HERMES, [("run", {"p": "\\d"})], 0
    ),
    "no arguments, as a text": (OPEN + written("now", '""') + CLOSE, HERMES, [("now", {})], 0),
    "no arguments, as null": (OPEN + written("now", "null") + CLOSE, HERMES, [("now", {})], 0),
    "two between one pair of tags": (
        OPEN + written("a", '{"x": 1}') + "\n" + written("b", "{}") + CLOSE, HERMES, [("a", {"x": 1}), ("b", {})], 1
    ),
    "and a comma": (
        OPEN + written("a", "{}") + ", " + written("b", "{}") + CLOSE + OPEN + written("c", "{}") + CLOSE, HERMES,
        [("a", {}), ("b", {}), ("c", {})], 1,
    ),
    "a list": (
        "[CALLS][" + written("a", '{"x": "1\n"}') + ", " + written("b", "{}") + "]", LIST,
        [("a", {"x": "1\n"}), ("b", {})], 2,
    ),
    "bare": (written("a", '{"x": "\\w"}'), BARE, [("a", {"x": "\\w"})], 1),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_what_was_meant_is_read(case: str) -> None:
    text, form, calls, lenient = READ[case]
    found = read_calls(text, form)
    assert [tuple(one) for one in found.calls] == calls
    assert found.broken == ()
    assert found.lenient == lenient
    assert not found.rest.strip()


@pytest.mark.parametrize("code", ['"1"', '"a\nb"'], ids=["JSON", "almost JSON"])
def test_json_that_is_nested_too_deeply_is_told(code: str) -> None:
    (broken,) = read_calls(OPEN + written("run", f'{{"code": {code}, "more": {"[" * 100_000}'), HERMES).broken
    assert (broken.name, broken.why) == ("run", "it is nested too deeply")


def test_a_broken_call_takes_no_other_with_it() -> None:
    text = f"so {OPEN}{written('a', '{}')}{CLOSE}\n{OPEN}{{oh}}{CLOSE}\n{OPEN}{written('b', '{}')}{CLOSE} and"
    found = read_calls(text, HERMES)
    assert found.calls == (ReadCall("a", {}), ReadCall("b", {}))
    ((place, name, why),) = found.broken
    assert (place, name) == (1, "unreadable")
    assert "JSON" in why
    assert found.rest.split() == ["so", "and"]
    of_list = read_calls(
        "[CALLS][" + written("a", "{}") + ', {"name": "b", "arguments": {oh}}, ' + written("c", "{}") + "]", LIST
    )
    assert [one.name for one in of_list.calls] == ["a", "c"]
    assert [(one.place, one.name) for one in of_list.broken] == [(1, "b")]
    together = read_calls(f"{OPEN}{written('a', '{}')}\n{written('b', '{oh}')}{CLOSE} so", HERMES)
    assert (together.calls, [one.name for one in together.broken]) == ((ReadCall("a", {}),), ["b"])
    no_object = read_calls(OPEN + written("a", "3") + CLOSE, HERMES).broken
    assert no_object[0].why == "the arguments of a are no JSON object"


texts = st.text('ab\\"</tool_call>{}\n d', max_size=12)


@given(st.lists(st.dictionaries(texts, texts | st.integers() | st.lists(texts), max_size=3), min_size=1, max_size=3))
def test_whatever_is_in_the_arguments_is_read_as_it_is(arguments: list[dict[str, Any]]) -> None:
    for form in (HERMES, LIST):
        if form is HERMES:
            text = "".join(f"{OPEN}{written('f', json.dumps(one))}{CLOSE}" for one in arguments)
        else:
            text = "[CALLS][" + ", ".join(written("f", json.dumps(one)) for one in arguments) + "]"
        found = read_calls(text, form)
        assert [dict(one.arguments) for one in found.calls] == arguments
        assert (found.broken, found.lenient) == ((), 0)


@given(st.text('ab\\"{}\n\tdu0', max_size=20))
def test_where_a_value_ends_is_where_it_was_written(text: str) -> None:
    raw = '{"x": "' + text.replace('"', "").rstrip("\\") + '"}'
    value, stop, _ = read_lenient_json(f"ab{raw}cd", 2)
    assert set(value) == {"x"}
    assert stop == 2 + len(raw)


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


@pytest.mark.parametrize(
    ("name", "end"), [("hermes", "<|im_end|>"), ("thinking", "<|im_end|>"), ("alternating", "<end_of_turn>")]
)
def test_valid_calls_are_answered_and_the_broken_one_is_told(name: str, end: str) -> None:
    box = Toolbox([add])
    turns = ChatTurns(tokenizer_of(name), box.schemas)
    thought = "<think>\nI call <tool_call>.\n</think>\n\n" if name == "thinking" else ""
    first, second, third = (written("add", x) for x in ('{"a": 1, "b": 2}', '{"a": 1, "b": oh}', '{"a": 3, "b": 4}'))
    text = f"{thought}Both. {OPEN}{first}{CLOSE}\n{OPEN}{second}{CLOSE}\n{OPEN}{third}{end}"
    reply = turns.reading.text(text)
    assert reply.fault is None
    assert reply.message["content"].strip() == "Both."
    assert [one["function"]["name"] for one in reply.message["tool_calls"]] == ["add"] * 3
    assert bool(reply.message.get("reasoning_content")) == (name == "thinking")
    seen = asyncio.run(box.answer(reply))
    assert [one["content"][:5] for one in seen.messages] == ["3", "Error", "7"]
    assert (seen.info["calls"], seen.info["malformed_calls"], seen.info["lenient_calls"]) == (2.0, 1.0, 1.0)
    more = turns.bridge(seen.messages, turns.encode(end)[-1])
    assert more is not None
    assert "could not be read" in turns.tokenizer.decode(more)
