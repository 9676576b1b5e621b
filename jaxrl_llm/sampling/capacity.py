"""The capacity of the engine: its rows and slots, and the lengths of prompts and completions that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.sampling.requests import Request

SPARE = 4  # prompt slots per prompt slot needed if groups ended together: unfinished rows keep theirs occupied


class Size(NamedTuple):
    """Numbers of rows and slots, and the lengths of prompts and completions that fit."""

    shape: Shape
    width: int  # most tokens of a prompt
    tokens: int  # most tokens of a completion
    parked: int = 0  # rows beside those in use, for conversations that gave theirs up

    def fits(self, request: Request) -> bool:
        """Whether a request's prompt and completion fit."""
        return len(request.prompt) <= self.width and request.limit <= self.tokens

    def grown(self, request: Request) -> Size:
        """The size that a request fits into, too."""
        width, tokens = bucket(len(request.prompt)), bucket(request.limit, least=4)
        return self._replace(width=max(self.width, width), tokens=max(self.tokens, tokens))


def size_for(requests: Sequence[Request], slots: int = 0, devices: int = 1, shape: Shape | None = None) -> Size:
    """The capacity for these requests. slots, devices, shape: see `stream` and `capacity.plan`."""
    shape = shape or plan([request.prefix for request in requests], slots, devices)
    width = bucket(max(len(request.prompt) for request in requests))
    return Size(shape, width, bucket(max(request.limit for request in requests), least=4))


class Shape(NamedTuple):
    """Sizes of the engine. Prefix slot p * slots_per_prompt + w is for a row that continues prompt slot p."""

    rows: int
    prompts: int  # prompt slots
    slots_per_prompt: int  # prefix slots of each prompt slot
    fixed: bool  # row b is always in prefix slot b
    repeats: bool = False  # equal groups may run at once, each in a prompt slot of its own


def plan(prompts: Sequence[Hashable], slots: int, multiple: int = 1) -> Shape:
    """Sizes for requests that continue these prompts, at most `slots` at a time (0: all at once).

    multiple: the numbers of rows and prompt slots are multiples of it, e.g. of the number of devices. If all groups run
    at once, or no two requests share a prompt, row b is always in prefix slot b; else rows find their prefix slots by
    an index, and there are up to SPARE times as many prompt slots as groups that end together would need.
    """
    total, sizes = len(prompts), Counter(prompts)
    group = max(sizes.values())
    rows = min(slots or total, total)
    if total <= rows and set(sizes.values()) == {group}:
        count = _up(len(sizes), multiple)
        return Shape(count * group, count, group, True)
    if group == 1:
        return Shape(_up(rows, multiple), _up(rows, multiple), 1, True)
    count = min(len(sizes), rows, -(-SPARE * rows // min(group, rows)))
    return lasting(rows, count, group, multiple)._replace(repeats=False)  # a prompt's requests are all one group


def lasting(rows: int, prompts: int, group: int, multiple: int = 1) -> Shape:
    """Sizes for any requests in groups of at most `group`, in which rows find their prefix slots by an index.

    rows, prompts: slots for completions and for prompts, rounded up to a multiple of `multiple`.
    """
    return Shape(_up(rows, multiple), _up(prompts, multiple), min(group, rows), False, True)


def for_conversations(slots: int, group: int, prompts: int, multiple: int = 1, anew: bool = False) -> tuple[Shape, int]:
    """Sizes for `prompts` groups of conversations, whose requests come back; and how many are kept beside the rows.

    slots: conversations decoded at a time; 0: all. group: of a prompt. anew: each turn has a prompt of its own.
    Beside the rows there is room for as many conversations, since those that began first come first, so that few more
    are under way. A prompt keeps its slot while its conversations are.
    """
    rows = min(slots or prompts * group, prompts * group)
    parked = min(prompts * group - rows, rows)
    most = rows + parked
    kept = rows if anew else min(prompts, most, -(-SPARE * most // min(group, rows)))
    return lasting(rows, kept, group, multiple), _up(parked, multiple)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
