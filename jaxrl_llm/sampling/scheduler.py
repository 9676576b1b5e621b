"""The engine's bookkeeping on the host: which row and slot a request gets."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.sampling.capacity import Shape


class Assignment(NamedTuple):
    """A request's row and prefix slot."""

    request: int
    row: int
    prefix_slot: int


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
        # int32[rows]: the prefix slot of each row, the last one of rows that are free.
        self.slot_of_row = np.arange(shape.rows, dtype=np.int32) % (shape.prompts * shape.slots_per_prompt)

    def add(self, request: int, prompt: Hashable, first: bool = False) -> None:
        """Queue a request that continues a prompt. first: before the others of its prompt, and that before others."""
        self.prompt_of[request] = prompt
        queue = self.waiting.setdefault(prompt, deque())
        if first:
            queue.appendleft(request)
            self.waiting = {prompt: queue, **self.waiting}
        else:
            queue.append(request)

    def drop(self, request: int) -> None:
        """Take a request out of the queue."""
        prompt = self.prompt_of.pop(request)
        self.waiting[prompt].remove(request)
        if not self.waiting[prompt]:
            del self.waiting[prompt]
            for slot in [*self.slots_of.get(prompt, ())]:
                self._leave(prompt, slot)

    @property
    def queue(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self.waiting.values()))

    @property
    def row_in(self) -> np.ndarray:
        """int32[prompts * slots_per_prompt]: the row in each prefix slot; 0 in those that are free."""
        rows = np.zeros(self.shape.prompts * self.shape.slots_per_prompt, np.int32)
        for place in self.placed.values():
            rows[place.prefix_slot] = place.row
        return rows

    def admit(
        self, row_for: Callable[[int, list[int]], int] = lambda request, free: free[0]
    ) -> tuple[list[Assignment], list[tuple[int, Any]]]:
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
                self.slot_of_row[row] = prefix_slot
                placed.append(self.placed[row])
            if not queue:
                del self.waiting[prompt]
            if not self.free_rows:
                break
        return placed, new

    def forget_unused(self) -> None:
        """Forget the prompts of free slots: those that come again are new."""
        self.holds = {slot: prompt for slot, prompt in self.holds.items() if slot not in self.free_slots}

    def _slot_for(self, prompt: Hashable) -> int:
        """The free slot that still holds the prompt, else the least recently used one."""
        own = (slot for slot in self.free_slots if self.holds.get(slot) == prompt)
        return next(own, min(self.free_slots, key=lambda slot: self.left.get(slot, -1)))

    def release(self, row: int) -> None:
        """Free a row. Its prompt slot becomes free when no row is in it, and none waits or the prompt has another."""
        request, _, prefix_slot = self.placed.pop(row)
        prompt = self.prompt_of.pop(request)
        slot = prefix_slot // self.shape.slots_per_prompt
        self.free_rows = sorted([*self.free_rows, row])
        place = prefix_slot % self.shape.slots_per_prompt
        self.free_prefix_slots[slot] = sorted([*self.free_prefix_slots[slot], place])
        self._leave(prompt, slot)

    def _leave(self, prompt: Hashable, slot: int) -> None:
        """Free a prompt's slot where no row is in it, and none waits or the prompt has another."""
        own = self.slots_of[prompt]
        empty = len(self.free_prefix_slots[slot]) == self.shape.slots_per_prompt
        if empty and (prompt not in self.waiting or len(own) > 1):
            own.remove(slot)
            self.left[slot] = max(self.left.values(), default=0) + 1
            self.free_slots = sorted([*self.free_slots, slot])
