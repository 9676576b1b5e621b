"""Tools whose answers are kept: asked once, then by the file alone, where other calls are errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.tools.base import EachEpisode, Toolbox, with_tools
from jaxrl_llm.environments.tools.kept import kept
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.value_digest import value_digest

ASKED: list[str] = []


def fare(start: str, days: int = 1) -> float:
    """What a ticket costs.

    Args:
        start: A town.
        days: How long it is valid.
    """
    ASKED.append(start)
    if start == "Nowhere":
        raise ValueError("no such town")
    return len(ASKED) + days / 2


class Session:
    """A kit with an async tool."""

    def __init__(self) -> None:
        self.functions: tuple[Callable[..., Any], ...] = (self.room,)
        self.closed = False

    async def room(self, town: str) -> str:
        """A room.

        Args:
            town: Where.
        """
        ASKED.append(town)
        return f"{town}\u2028Inn"

    def close(self) -> None:
        ASKED.append("closed")


def said(tools: Any, *calls: ReadCall) -> Observation:
    box = Toolbox([tools])
    found = asyncio.run(box.answer(Reply({"role": "assistant", "content": ""}, calls)))
    box.close()
    return found


def texts(found: Observation) -> list[str]:
    return [str(one["content"]) for one in found.messages]


def test_what_was_asked_once_is_answered_by_the_file(tmp_path: Path) -> None:
    ASKED.clear()
    path, tools = tmp_path / "new" / "answers.jsonl", [fare, EachEpisode(Session)]
    first = said(kept(path, tools), ReadCall("fare", {"start": "Alder"}), ReadCall("fare", {"start": "Alder"}))
    assert texts(first) == ["1.5", "1.5"], "the answer of the first call, though the tool would say 2.5 now"
    again = said(kept(str(path), tools), ReadCall("room", {"town": "Elm"}), ReadCall("fare", {"start": "Alder"}))
    assert texts(again) == ["Elm\u2028Inn", "1.5"]
    assert ASKED == ["Alder", "closed", "Elm", "closed"]
    failed = said(kept(path, tools), ReadCall("fare", {"start": "Nowhere"}))
    assert texts(failed)[0].startswith("Error: ")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one.get("answer") for one in lines if "answer" in one] == ["1.5", "Elm\u2028Inn"], "errors are not kept"
    assert sum("tool" in one for one in lines) == 2


def test_a_file_alone_answers_and_other_calls_are_errors(tmp_path: Path) -> None:
    ASKED.clear()
    path = tmp_path / "answers.jsonl"
    said(kept(path, [fare, EachEpisode(Session)]), ReadCall("fare", {"start": "Alder", "days": 2}))
    alone = kept(path)
    assert with_tools([alone])({}).tools == with_tools([fare, EachEpisode(Session)])({}).tools
    ASKED.clear()
    before = path.read_text()
    known, other, default = (
        ReadCall("fare", one) for one in ({"days": 2, "start": "Alder"}, {"start": "Elm"}, {"start": "Alder"})
    )
    found = said(alone, known, other, default, ReadCall("room", {"town": "Elm"}))
    assert texts(found)[0] == "2.0"
    assert texts(found)[1] == "Error: LookupError: no answer of fare to {'start': 'Elm'} is kept"
    assert (found.info["calls"], found.info["failed_calls"]) == (4, 3)
    assert (ASKED, path.read_text()) == ([], before)


def test_episodes_that_are_copied_go_on_with_the_same_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    world = with_tools([kept(path, [fare])])({})
    other = world.copy()  # type: ignore[attr-defined]
    reply = Reply({"role": "assistant", "content": ""}, (ReadCall("fare", {"start": "Alder"}),))
    assert texts(asyncio.run(world.step(reply))) == texts(asyncio.run(other.step(reply)))  # type: ignore[arg-type]


def double(number: int) -> int:
    """Double a number.

    Args:
        number: Any.
    """
    return 2 * number


def test_a_resumed_run_knows_whether_the_world_is_the_same(tmp_path: Path) -> None:
    """A file that answers alone counts with what it says; one that grows by its name."""
    path = tmp_path / "answers.jsonl"
    growing = value_digest(kept(path, [double]))
    said(kept(path, [double]), ReadCall("double", {"number": 2}))
    assert value_digest(kept(path, [double])) == growing
    alone = value_digest(kept(path))
    assert value_digest(kept(path)) == alone
    said(kept(path, [double]), ReadCall("double", {"number": 3}))
    assert value_digest(kept(path)) != alone


def test_files_that_cannot_answer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"answers.jsonl does not exist: give the tools too"):
        kept(tmp_path / "answers.jsonl")
    (tmp_path / "answers.jsonl").write_text("\n")
    with pytest.raises(InputError, match="describes no tools"):
        kept(tmp_path / "answers.jsonl")
    for wrong in ("{", '{"name": "fare"}', "[]", '{"name": "a", "arguments": {}, "answer": 3}'):
        (tmp_path / "answers.jsonl").write_text(f"\n{wrong}\n")
        with pytest.raises(InputError, match=r"line 2, is no tool and no answer"):
            kept(tmp_path / "answers.jsonl", [fare])
