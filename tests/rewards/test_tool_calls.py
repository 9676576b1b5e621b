"""The reward of single calls of search tools: the worked example, labels by rules and by a judge, and as a reward."""

from __future__ import annotations

import asyncio
import doctest
import json
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.data.chat.calls import ReadCall as ToolCall
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.tools.base import Toolbox
from jaxrl_llm.rewards import tool_calls
from jaxrl_llm.rewards.registry import get_reward
from jaxrl_llm.rewards.tool_calls import (
    EXPLORATION,
    REDUNDANT_QUERY,
    REDUNDANT_SEARCH,
    UNIQUE,
    VERIFICATION,
    Call,
    call_reward,
    calls_of,
    judged,
    labels_by_rules,
    limited,
    useful_calls,
    valid_calls,
)
from jaxrl_llm.rewards.verifiers import exact_match


def search(query: str) -> Call:
    return Call("search_urls", {"query": query})


def page(url: str, goal: str = "") -> Call:
    return Call("query_url", {"url": url, "goal": goal})


def talk(calls: list[Call], answer: str, as_text: bool = False) -> list[dict[str, Any]]:
    """A conversation with a call in each reply."""
    out: list[dict[str, Any]] = []
    for call in calls:
        arguments = json.dumps(call.arguments) if as_text else call.arguments
        told = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
        out += [{"role": "assistant", "content": "", "tool_calls": [told]}, {"role": "tool", "content": "found"}]
    return [*out, {"role": "assistant", "content": answer}]


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(tool_calls)
    assert found.failed == 0
    assert found.attempted >= 4


@pytest.mark.parametrize(
    ("labels", "right", "expected"),
    [
        ([REDUNDANT_SEARCH, REDUNDANT_QUERY, *[UNIQUE] * 3, *[EXPLORATION] * 4], True, 0.877778),
        ([*[REDUNDANT_SEARCH] * 8, UNIQUE, EXPLORATION], True, 0.6),
        ([*[UNIQUE] * 5, REDUNDANT_SEARCH, *[EXPLORATION] * 9, VERIFICATION, REDUNDANT_QUERY], False, 0.3125),
        ([UNIQUE, *[REDUNDANT_SEARCH] * 5, EXPLORATION, *[REDUNDANT_QUERY] * 3], False, -0.025),
    ],
)  # fmt: skip
def test_the_worked_example(labels: list[str], right: bool, expected: float) -> None:
    """With 0.1 for the format."""
    assert 0.1 + call_reward(labels, right) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("right", [True, False])
def test_it_is_the_loop(right: bool) -> None:
    random = np.random.default_rng(0)
    names = [UNIQUE, REDUNDANT_SEARCH, EXPLORATION, VERIFICATION, REDUNDANT_QUERY, None]
    for _ in range(50):
        labels = [names[i] for i in random.integers(0, 6, random.integers(0, 30))]
        unique = redundant = useful = useless = 0
        for one in labels:
            unique, redundant = unique + (one == UNIQUE), redundant + (one == REDUNDANT_SEARCH)
            useful += one in (EXPLORATION, VERIFICATION)
            useless += one == REDUNDANT_QUERY
        if right:
            share = (redundant + useless) / len(labels) if labels else 0.0
            expected = 1 - share if share < 0.5 else 0.5
        else:
            a, b = (unique - redundant) / 3, (useful - useless) / 5
            expected = 0.3 * (a if a < 1 else 1) + 0.1 * (b if b < 1 else 1)
        assert call_reward(labels, right, 3, 5, (0.3, 0.1)) == pytest.approx(expected)


def test_labels_by_rules() -> None:
    calls = [
        search("height of the Eiffel tower"), search("the Eiffel Tower: height of"), search("who built the tower"),
        page("https://www.example.org/tower/"), page("http://example.org/tower#height", "check"),
        page("https://example.org/tower", "check again"), page("example.org/other"), page("example.org/other", "again"),
        Call("calculator", {"expression": "1 + 1"}),
    ]  # fmt: skip
    found = labels_by_rules("", calls, "330 m (https://example.org/tower).")
    assert found == [
        UNIQUE, REDUNDANT_SEARCH, UNIQUE, EXPLORATION, VERIFICATION, VERIFICATION, EXPLORATION, REDUNDANT_QUERY, None,
    ]  # fmt: skip
    assert limited(found, calls, 1)[3:6] == [EXPLORATION, VERIFICATION, REDUNDANT_QUERY]
    assert limited(found, calls, 0)[3:6] == [EXPLORATION, REDUNDANT_QUERY, REDUNDANT_QUERY]
    assert limited(found, calls, 2) == found
    assert labels_by_rules("", calls, "330 m")[4] == REDUNDANT_QUERY, "the answer does not cite it"
    assert labels_by_rules("", calls[4:], "330 m")[0] == EXPLORATION, "the first query of the page"


class Judge:
    """An endpoint that says one label of everything, or nothing that is one."""

    def __init__(self, says: str) -> None:
        self.says, self.asked = says, list[str]()

    def answer(self, question: str, number: int = 0) -> str:
        self.asked.append(question)
        return f"So it seems. [[{self.says}]]"


def test_a_judge_labels_calls_and_the_rules_where_it_says_none() -> None:
    calls = [search("tides"), search("tides"), Call("calculator", {}), page("example.org/a")]
    judge: Any = Judge(REDUNDANT_SEARCH)
    found = judged(judge)("Why are there tides?", calls, "The Moon.")
    assert found == [REDUNDANT_SEARCH, REDUNDANT_SEARCH, None, EXPLORATION], "no label of a page: the rules'"
    assert len(judge.asked) == 3
    for one in ("Why are there tides?", 'search_urls({"query": "tides"})', "The Moon.", UNIQUE):
        assert one in judge.asked[1]
    other: Any = Judge("I do not know")
    assert judged(other)("", calls, "") == labels_by_rules("", calls, "")
    reward = useful_calls(exact_match, label=judged(judge))
    scored = reward([talk(calls, "The Moon.")], [[{"role": "user", "content": "Why?"}]], answer=["The Moon."])
    assert scored["reward"] == [0.5]
    assert "Why?" in judge.asked[-1]


@pytest.mark.parametrize("as_text", [False, True])
def test_it_is_a_reward_of_conversations(as_text: bool) -> None:
    """Right and wrong answers after the same calls, of which one in four is redundant; and texts, without calls."""
    calls = [search("tides"), search("Tides!"), page("example.org/a"), page("example.org/b")]
    assert calls_of(talk(calls, "", as_text)) == calls
    reward = get_reward("useful_calls(exact_match, 4, 8, 1)")
    talks = [talk(calls, answer, as_text) for answer in ("The Moon.", "The wind.")]
    asked = [[{"role": "user", "content": "Why are there tides?"}]] * 2
    found = reward.function(completions=talks, prompts=asked, answer=["The Moon."] * 2)
    rewards = found["reward"] if isinstance(found, dict) else found
    np.testing.assert_allclose(rewards, [0.75, 0.2 * 0 / 4 + 0.2 * 2 / 8])
    texts = useful_calls(exact_match)(["4", "5"], ["2 + 2", "2 + 2"], answer=["4", "4"])
    assert texts["reward"] == [1.0, 0.0]
    none = useful_calls(lambda completions, prompts: [None, float("nan")])(["4", "5"], ["", ""])
    assert none["reward"] == [None, None]


@pytest.mark.parametrize(
    ("call", "valid"),
    [(ToolCall("add", {"a": 1, "b": 2}), 1.0), (ToolCall("ad", {"a": 1}), 0.0), (ToolCall("add", {"a": 1}), 0.0)],
)
def test_calls_that_a_tool_answers_are_valid(call: ToolCall, valid: float) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return a + b

    seen = asyncio.run(Toolbox([add]).answer(Reply({"role": "assistant", "content": ""}, (call,))))
    told = [{"role": "assistant", "content": ""}, *seen.messages, {"role": "assistant", "content": "Error: mine"}]
    assert valid_calls([told]) == [valid]


def test_a_call_that_cannot_be_read_is_not_valid() -> None:
    seen = asyncio.run(Toolbox([]).answer(Reply({"role": "assistant", "content": ""}, (), "no JSON")))
    assert valid_calls([seen.messages, "a text"]) == [0.0, 1.0]
