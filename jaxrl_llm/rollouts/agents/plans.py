"""Replies that say a plan: whether to switch to a new subgoal, the subgoal, and the action, each between tags."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.utils.errors import InputError

PLAN = "plan"
KEEP, SWITCH, SUBGOAL, NEW_SUBGOAL, ACTION = 1, 2, 3, 4, 5  # the values of info["plan"]
TAGS = ("switch", "subgoal", "action")


@part
def planned(rollout: Rollout, tags: tuple[str, str, str] = TAGS) -> Rollout:
    """A rollout whose episodes have info["plan"], read from their replies; provides `plan`.

    A reply should say <switch>KEEP</switch> or <switch>SWITCH</switch>, <subgoal>...</subgoal> and
    <action>...</action>, in any order, with other text between; tags: other names of these three, in this order. A
    subgoal is new unless its text is that of the last turn of the episode that has one, but for space around it. A part
    that a reply lacks has no tokens; anything but SWITCH keeps the subgoal.
    """
    if len(tags) != 3 or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise InputError(f"tags are {tags!r}, but must be three names: of the decision, the subgoal and the action")

    async def program(tools: Tools, task: Task) -> list[Episode]:
        found = list(await rollout.program(tools, task))
        subgoals: dict[Any, str | None] = {}
        out = []
        for number, row in enumerate(found):
            episode = row.info.get("episode", number)
            kinds, subgoals[episode] = plan_of(row, tools, tags, subgoals.get(episode))
            out.append(row.with_info(plan=kinds))
        return out

    return replace(rollout, program=program, provides=rollout.provides | {PLAN})


def items_in(text: str) -> list[str]:
    """The lines of a list that are not blank, without numbers and bullets.

    >>> items_in("1. How many apples?\\n\\n- What is the price?")
    ['How many apples?', 'What is the price?']
    """
    lines = [re.sub(r"^\s*(?:\d+[.)]|[-*])?\s*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def plan_of(
    row: Episode, tools: Any, tags: Sequence[str] = TAGS, subgoal: str | None = None
) -> tuple[list[float], str | None]:
    """The kind of each token after the prompt, and the last subgoal. tools: decodes. subgoal: that before the row."""
    ids, turns = row.own.token, row.turns
    kinds = np.zeros(len(ids))
    for turn in range(int(turns.max(initial=-1)) + 1):
        places = np.flatnonzero(turns == turn)
        own = ids[places].tolist()
        text = tools.decode(own)
        for tag, part_of_plan in zip(tags, TAGS, strict=True):
            if (match := re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)) is None:
                continue
            said, kind = match[1].strip(), ACTION
            if part_of_plan == "switch":
                kind = SWITCH if said.upper() == "SWITCH" else KEEP
            if part_of_plan == "subgoal":
                kind, subgoal = SUBGOAL if said == subgoal else NEW_SUBGOAL, said
            kinds[places[_tokens_of(tools, own, *match.span(1))]] = kind
    return kinds.tolist(), subgoal


def _tokens_of(tools: Any, ids: Sequence[int], start: int, end: int) -> slice:
    """The tokens that say the letters from `start` to before `end` of the decoded text. tools: decodes."""

    def letters(count: int) -> int:
        return len(tools.decode(ids[:count]).rstrip("\ufffd"))

    counts = range(len(ids) + 1)
    first = bisect_right(counts, start, key=letters) - 1
    return slice(max(first, 0), bisect_left(counts, end, key=letters))
