"""Tools that episodes have of their own: made for each, closed at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.environments.adapters import environments
from jaxrl_llm.environments.tools.base import EachEpisode, Toolbox, result_text, schema_of, with_tools
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["hermes"][1]
CALL = f'<tool_call>\n{{"name": "count", "arguments": {{}}}}\n</tool_call>{END}'


class Counter:
    """A kit."""

    made: list[Counter]

    def __init__(self) -> None:
        self.number, self.closed = 0, 0
        self.functions: tuple[Callable[..., Any], ...] = (self.count,)
        self.made.append(self)

    def count(self) -> str:
        """Count up."""
        self.number += 1
        return f"now {self.number}"

    def close(self) -> None:
        self.closed += 1


def says(text: str, sample: int) -> str:
    return CALL if text.count("<tool_response>") <= sample else f"Done.{END}"


class World:
    """As TRL documents them."""

    rewarded = 0

    def reset(self, **row: Any) -> None:
        pass

    def get_reward(self) -> float:
        World.rewarded += 1
        return 2.0


@pytest.mark.parametrize("kind", ["alone", "beside an environment"])
def test_each_episode_has_its_own(kind: str) -> None:
    Counter.made, World.rewarded = [], 0
    each = EachEpisode(Counter)
    make = with_tools([each]) if kind == "alone" else environments(World, tools=(each,))
    checked = len(Counter.made)
    tokenizer = tokenizer_of("hermes")
    found, _ = run_agents(agent(make), tokenizer, says, [{"prompt": "Count."}])
    assert sorted(one.number for one in Counter.made[checked:]) == [1, 2]
    assert {one.closed for one in Counter.made} == {1}
    text = tokenizer.decode(found.groups[0].episodes[1].tokens)
    assert text.index("now 1") < text.index("now 2")
    assert World.rewarded == (0 if kind == "alone" else 2)


def test_a_schema_may_be_given() -> None:
    def free(**arguments: Any) -> str:
        return str(sorted(arguments.items()))

    schema = {"type": "function", "function": {"name": "free", "description": "", "parameters": {"type": "object"}}}
    free.schema = schema  # type: ignore[attr-defined]
    assert schema_of(free) == schema
    assert Toolbox([free]).schemas == (schema,)


def test_what_is_wrong_is_found_before_an_episode() -> None:
    Counter.made = []

    def undescribed(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(InputError, match="two tools are called count"):
        with_tools([EachEpisode(Counter), EachEpisode(Counter)])
    with pytest.raises(InputError, match="the tool undescribed is not described"):
        with_tools([EachEpisode(Counter), undescribed])
    with pytest.raises(InputError, match=r"tools\[0\] of with_tools is 3, but must be a function"):
        with_tools([3])  # type: ignore[list-item]
    assert [one.closed for one in Counter.made] == [1, 1, 1]


def test_a_long_result_keeps_its_beginning_and_its_end() -> None:
    text = "first " + "x" * 1000 + " Error: the last line"
    shown = result_text(text, 100)
    first, line, last = shown.split("\n")
    assert first.startswith("first x")
    assert last.endswith("Error: the last line")
    assert len(first) + len(last) == 100
    assert line == f"[... {len(text) - 100:,} characters are left out ...]"
    assert result_text(text, len(text)) == text
