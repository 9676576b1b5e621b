"""The engine's bookkeeping on the host: its capacity, and which row and slot a request gets."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
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


def size_for(requests: Sequence[Request], slots: int = 0, devices: int = 1, shape: Shape | None = None) -> Size:
    """The capacity for these requests. slots, devices, shape: see `stream` and `scheduler.plan`."""
    shape = shape or plan([request.prompt for request in requests], slots, devices)
    width = bucket(max(len(request.prompt) for request in requests))
    return Size(shape, width, bucket(max(request.limit for request in requests), least=4))


class Shape(NamedTuple):
    """Sizes of the engine. Prefix slot p * slots_per_prompt + w is for a row that continues prompt slot p."""

    rows: int
    prompts: int  # prompt slots
    slots_per_prompt: int  # prefix slots of each prompt slot
    fixed: bool  # row b is always in prefix slot b
    repeats: bool = False  # equal groups may run at once, each in a prompt slot of its own


class Assignment(NamedTuple):
    """A request's row and prefix slot."""

    request: int
    row: int
    prefix_slot: int


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


class Schedule:
    """A queue of requests, group by group. A free row takes the first request whose prompt has or gets a slot.

    Where groups may be equal (`Shape.repeats`), a prompt gets a second slot once its first is full.
    """

    def __init__(self, prompts: Sequence[Hashable], shape: Shape) -> None:
        self.shape = shape
        self.prompt_of: dict[int, Hashable] = {}
        self.waiting: dict[Hashable, deque[int]] = {}
        for request, prompt in enumerate(prompts):
            self.add(request, prompt)
        self.slots_of: dict[Hashable, list[int]] = {}
        self.holds: dict[int, Hashable] = {}  # prompt in each slot, even if no row continues it any more
        self.left: dict[int, int] = {}  # order in which slots became free
        self.free_slots = list(range(shape.prompts))
        self.free_prefix_slots = {slot: list(range(shape.slots_per_prompt)) for slot in range(shape.prompts)}
        self.free_rows = list(range(shape.rows))
        self.placed: dict[int, Assignment] = {}  # by row

    def add(self, request: int, prompt: Hashable, first: bool = False) -> None:
        """Queue a request that continues a prompt. first: before the others of its prompt, and that before others."""
        self.prompt_of[request] = prompt
        queue = self.waiting.setdefault(prompt, deque())
        if first:
            queue.appendleft(request)
            self.waiting = {prompt: queue, **self.waiting}
        else:
            queue.append(request)

    @property
    def queue(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self.waiting.values()))

    def admit(
        self, row_for: Callable[[int, list[int]], int] = lambda request, free: free[0]
    ) -> tuple[list[Assignment], list[tuple[int, Hashable]]]:
        """Give free rows to waiting requests. Returns the assignments, and new prompts with their prompt slots.

        row_for: which of the free rows a request takes, where the shape leaves it open.
        """
        placed, new = [], []
        for prompt in list(self.waiting):
            queue = self.waiting[prompt]
            while queue and self.free_rows:
                own = self.slots_of.setdefault(prompt, [])
                slot = next((slot for slot in own if self.free_prefix_slots[slot]), None)
                if slot is None:
                    if not self.free_slots or (own and not self.shape.repeats):
                        break
                    slot = self._slot_for(prompt)
                    own.append(slot)
                    self.free_slots.remove(slot)
                    if self.holds.get(slot) != prompt:
                        new.append((slot, prompt))
                        self.holds[slot] = prompt
                prefix_slot = slot * self.shape.slots_per_prompt + self.free_prefix_slots[slot].pop(0)
                row = prefix_slot if self.shape.fixed else row_for(queue[0], self.free_rows)
                self.free_rows.remove(row)
                self.placed[row] = Assignment(queue.popleft(), row, prefix_slot)
                placed.append(self.placed[row])
            if not queue:
                del self.waiting[prompt]
            if not self.free_rows:
                break
        return placed, new

    def _slot_for(self, prompt: Hashable) -> int:
        """The free slot that still holds the prompt, else the least recently used one."""
        for slot in self.free_slots:
            if self.holds.get(slot) == prompt:
                return slot
        return min(self.free_slots, key=lambda slot: self.left.get(slot, -1))

    def release(self, row: int) -> None:
        """Free a row. Its prompt slot becomes free when no row is in it, and none waits or the prompt has another."""
        request, _, prefix_slot = self.placed.pop(row)
        prompt = self.prompt_of.pop(request)
        slot, own = prefix_slot // self.shape.slots_per_prompt, self.slots_of[prompt]
        self.free_rows = sorted([*self.free_rows, row])
        self.free_prefix_slots[slot] = sorted(
            [*self.free_prefix_slots[slot], prefix_slot % self.shape.slots_per_prompt]
        )
        empty = len(self.free_prefix_slots[slot]) == self.shape.slots_per_prompt
        if empty and (prompt not in self.waiting or len(own) > 1):
            own.remove(slot)
            self.left[slot] = max(self.left.values(), default=0) + 1
            self.free_slots = sorted([*self.free_slots, slot])
