"""Which request goes into which slot: host bookkeeping of the engine, without any array."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple

SPARE = 4  # prompt slots for each that would do, if groups ended as one: stragglers hold theirs


class Shape(NamedTuple):
    """Sizes of the engine. Lane p * lanes + w may hold a row that continues prompt slot p."""

    rows: int
    prompts: int  # prompt slots
    lanes: int  # of each prompt slot
    fixed: bool  # row b always stands in lane b


class Placed(NamedTuple):
    """A request that was given a row."""

    request: int
    row: int
    lane: int


def plan(prompts: Sequence[Hashable], slots: int, multiple: int = 1) -> Shape:
    """Sizes for requests that continue these prompts, at most `slots` at a time (0: all at once).

    multiple: of what numbers of rows and prompt slots must be, i.e. the devices that they are spread over. Where all
    groups run at once side by side, or no two requests share a prompt, a row's lane is fixed; else rows find theirs by
    an index, and there are up to SPARE times the prompt slots that groups in step would need.
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
    """Sizes for any requests in groups of at most `group`: rows find their lanes by an index.

    rows, prompts: slots for completions and for prompts, rounded up to what `plan` calls `multiple`.
    """
    return Shape(_up(rows, multiple), _up(prompts, multiple), min(group, rows), False)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Schedule:
    """Requests wait in order, group by group; a row that is freed takes the first that has a prompt slot to go to."""

    def __init__(self, prompts: Sequence[Hashable], shape: Shape) -> None:
        self.shape = shape
        self.prompt_of: dict[int, Hashable] = {}
        self.waiting: dict[Hashable, deque[int]] = {}
        for request, prompt in enumerate(prompts):
            self.add(request, prompt)
        self.slot_of: dict[Hashable, int] = {}
        self.holds: dict[int, Hashable] = {}  # which prompt is in a slot, even where no row continues it any more
        self.left: dict[int, int] = {}  # when a slot was left last, by a count
        self.free_slots = list(range(shape.prompts))
        self.free_lanes = {slot: list(range(shape.lanes)) for slot in range(shape.prompts)}
        self.free_rows = list(range(shape.rows))
        self.placed: dict[int, Placed] = {}  # by row

    def add(self, request: int, prompt: Hashable) -> None:
        """A request that continues a prompt waits from now on."""
        self.prompt_of[request] = prompt
        self.waiting.setdefault(prompt, deque()).append(request)

    @property
    def queue(self) -> int:
        """Requests that wait."""
        return sum(map(len, self.waiting.values()))

    def admit(self) -> tuple[list[Placed], list[tuple[int, Hashable]]]:
        """Give free rows to waiting requests: who was placed, and which prompt slots hold which new prompts."""
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
                if not self.free_lanes[slot]:
                    break
                lane = slot * self.shape.lanes + self.free_lanes[slot].pop(0)
                row = lane if self.shape.fixed else self.free_rows[0]
                self.free_rows.remove(row)
                self.placed[row] = Placed(queue.popleft(), row, lane)
                placed.append(self.placed[row])
            if not queue:
                del self.waiting[prompt]
            if not self.free_rows:
                break
        return placed, new

    def _slot_for(self, prompt: Hashable) -> int:
        """The free slot that still holds the prompt, or the one that was left first."""
        for slot in self.free_slots:
            if self.holds.get(slot) == prompt:
                return slot
        return min(self.free_slots, key=lambda slot: self.left.get(slot, -1))

    def release(self, row: int) -> None:
        """The row's request is done. Its prompt slot is free once no row is in it and none waits for it."""
        request, _, lane = self.placed.pop(row)
        prompt = self.prompt_of.pop(request)
        slot = self.slot_of[prompt]
        self.free_rows = sorted([*self.free_rows, row])
        self.free_lanes[slot] = sorted([*self.free_lanes[slot], lane % self.shape.lanes])
        if len(self.free_lanes[slot]) == self.shape.lanes and prompt not in self.waiting:
            del self.slot_of[prompt]
            self.left[slot] = max(self.left.values(), default=0) + 1
            self.free_slots = sorted([*self.free_slots, slot])
