"""What agents act in while their runs are killed; given as path/to/agent_worlds.py:NAME.

A policy of random weights calls no tool, so where this file is loaded each reply is read as a call of the first one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.tools.python import python
from jaxrl_llm.rollouts.agents.compaction import keep_last

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "training"))

from worlds import SHORT, Duel, Echo, Purse, add, everything

__all__ = ["LAST", "SHORT", "Duel", "Echo", "Purse", "add", "everything", "python"]
LAST = keep_last(1)
os.environ.setdefault("WORLD_SECONDS", "0.02")  # that environments take, so that kills come while one is working


class AsCalls:
    """Reads each reply as a call: Python code that prints its length and keeps it, or a text for another tool."""

    def __init__(self, chat: ChatTurns) -> None:
        self.chat = chat
        names = [tool["function"]["name"] for tool in chat.tools or ()]
        self.name = names[0] if names else ""

    def __call__(self, ids: Sequence[int]) -> Reply:
        text = self.chat.tokenizer.decode(list(ids), skip_special_tokens=True)
        if not self.name:
            return Reply({"role": "assistant", "content": text}, ())
        given = {"text": text} if self.name == "add" else {"code": f"n = globals().get('n', 0) + {len(text)}\nn"}
        said = {"type": "function", "function": {"name": self.name, "arguments": given}}
        return Reply({"role": "assistant", "content": "", "tool_calls": [said]}, (ReadCall(self.name, given),))


reading = cached_property(AsCalls)
reading.__set_name__(ChatTurns, "reading")
ChatTurns.reading = reading  # type: ignore[assignment]
