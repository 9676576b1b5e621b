"""Assignment of requests to rows and slots: the engine's bookkeeping on the host, without arrays."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

SPARE = 4  # prompt slots per prompt slot needed if groups ended together: unfinished rows keep theirs occupied


class Shape(NamedTuple):
    """Sizes of the engine. Prefix slot p * slots_per_prompt + w is for a row that continues prompt slot p."""

    rows: int
    prompts: int  # prompt slots
    slots_per_prompt: int  # prefix slots of each prompt slot
    fixed: bool  # row b is always in prefix slot b


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
    return lasting(rows, min(len(sizes), rows, -(-SPARE * rows // min(group, rows))), group, multiple)


def lasting(rows: int, prompts: int, group: int, multiple: int = 1) -> Shape:
    """Sizes for any requests in groups of at most `group`, in which rows find their prefix slots by an index.

    rows, prompts: slots for completions and for prompts, rounded up to a multiple of `multiple`.
    """
    return Shape(_up(rows, multiple), _up(prompts, multiple), min(group, rows), False)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Schedule:
    """A queue of requests, group by group. A free row takes the first request whose prompt has or gets a slot."""

    def __init__(self, prompts: Sequence[Hashable], shape: Shape) -> None:
        self.shape = shape
        self.prompt_of: dict[int, Hashable] = {}
        self.waiting: dict[Hashable, deque[int]] = {}
        for request, prompt in enumerate(prompts):
            self.add(request, prompt)
        self.slot_of: dict[Hashable, int] = {}
        self.holds: dict[int, Hashable] = {}  # prompt in each slot, even if no row continues it any more
        self.left: dict[int, int] = {}  # order in which slots became free
        self.free_slots = list(range(shape.prompts))
        self.free_prefix_slots = {slot: list(range(shape.slots_per_prompt)) for slot in range(shape.prompts)}
        self.free_rows = list(range(shape.rows))
        self.placed: dict[int, Assignment] = {}  # by row

    def add(self, request: int, prompt: Hashable) -> None:
        """Queue a request that continues a prompt."""
        self.prompt_of[request] = prompt
        self.waiting.setdefault(prompt, deque()).append(request)

    @property
    def queue(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self.waiting.values()))

    def admit(self) -> tuple[list[Assignment], list[tuple[int, Hashable]]]:
        """Give free rows to waiting requests. Returns the assignments, and new prompts with their prompt slots."""
        placed, new = [], []
        for prompt in list(self.waiting):
            queue = self.waiting[prompt]
            while queue and self.free_rows:
                if prompt not in self.slot_of:
                    if not self.free_slots:
                        break
                    self.slot_of[prompt] = slot = self._slot_for(prompt)
                    self.free_slots.remove(slot)
                    if self.holds.get(slot) != prompt:
                        new.append((slot, prompt))
                        self.holds[slot] = prompt
                slot = self.slot_of[prompt]
                if not self.free_prefix_slots[slot]:
                    break
                prefix_slot = slot * self.shape.slots_per_prompt + self.free_prefix_slots[slot].pop(0)
                row = prefix_slot if self.shape.fixed else self.free_rows[0]
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
        """Free a row. Its prompt slot becomes free when no row is in it and no request waits for it."""
        request, _, prefix_slot = self.placed.pop(row)
        prompt = self.prompt_of.pop(request)
        slot = self.slot_of[prompt]
        self.free_rows = sorted([*self.free_rows, row])
        self.free_prefix_slots[slot] = sorted(
            [*self.free_prefix_slots[slot], prefix_slot % self.shape.slots_per_prompt]
        )
        if len(self.free_prefix_slots[slot]) == self.shape.slots_per_prompt and prompt not in self.waiting:
            del self.slot_of[prompt]
            self.left[slot] = max(self.left.values(), default=0) + 1
            self.free_slots = sorted([*self.free_slots, slot])
