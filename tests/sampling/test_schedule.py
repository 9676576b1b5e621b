"""The schedule of slots: whatever ends when, each request has one row, and no row waits without need."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.sampling.capacity import SPARE, Shape, for_conversations, lasting, plan
from jaxrl_llm.sampling.scheduler import Schedule

PROMPTS = st.lists(st.integers(0, 6), min_size=1, max_size=40)


def smallest_fit(prompts: list[int], slots: int) -> tuple[int, int]:
    """How many rows may run at most, and how many of them of one prompt."""
    rows = min(slots or len(prompts), len(prompts))
    return rows, min(rows, max(Counter(prompts).values()))


@settings(max_examples=300, deadline=None)
@given(prompts=PROMPTS, slots=st.integers(0, 45), multiple=st.sampled_from([1, 2, 3, 8]))
def test_shapes(prompts: list[int], slots: int, multiple: int) -> None:
    shape = plan(prompts, slots, multiple)
    sizes = Counter(prompts)
    rows, together = smallest_fit(prompts, slots)
    assert shape.rows % multiple == 0
    assert shape.prompts % multiple == 0
    # Room for as many as are asked for, and no more than the next multiple (of whole groups, if `fixed`).
    assert shape.rows >= rows
    assert shape.rows < rows + multiple * (shape.slots_per_prompt if shape.fixed else 1)
    assert shape.slots_per_prompt == together
    assert shape.prompts < len(sizes) + multiple
    if shape.fixed:
        assert shape.rows == shape.prompts * shape.slots_per_prompt
    else:
        # Prefix slots for all rows, even while each prompt slot but one holds a single straggler.
        assert shape.prompts * shape.slots_per_prompt >= rows or shape.prompts >= len(sizes)
        assert shape.prompts <= -(-SPARE * rows // shape.slots_per_prompt) + multiple - 1
    if multiple == 1:
        assert shape.rows == rows


@pytest.mark.parametrize(
    "prompts, slots, multiple, expected",
    [
        ("aaabbb", 0, 1, Shape(6, 2, 3, True)),  # whole groups side by side
        ("abab", 9, 1, Shape(4, 2, 2, True)),
        ("aaabb", 0, 1, Shape(5, 2, 3, False)),  # groups of two sizes
        ("abcdefgh", 3, 1, Shape(3, 3, 1, True)),  # every request its own prompt
        ("abc", 0, 1, Shape(3, 3, 1, True)),
        ("aabbccddee", 4, 1, Shape(4, 4, 2, False)),
        ("a" * 16, 4, 1, Shape(4, 1, 4, False)),
        ("".join(c * 16 for c in "abcdefgh"), 16, 1, Shape(16, 4, 16, False)),
        ("".join(c * 4 for c in "abcdefghij"), 8, 1, Shape(8, 8, 4, False)),
        ("aaa", 2, 1, Shape(2, 1, 2, False)),
        ("aaabbb", 0, 4, Shape(12, 4, 3, True)),  # the mesh's four devices take a prompt slot each
        ("abcde", 3, 2, Shape(4, 4, 1, True)),
        ("aabbccddee", 3, 8, Shape(8, 8, 2, False)),
        ("a", 0, 8, Shape(8, 8, 1, True)),
    ],
)
def test_shapes_by_hand(prompts: str, slots: int, multiple: int, expected: Shape) -> None:
    assert plan(prompts, slots, multiple) == expected


@pytest.mark.parametrize(
    ("slots", "group", "prompts", "multiple", "anew", "expected"),
    [
        (0, 4, 4, 1, False, (Shape(16, 4, 4, False, True), 0)),  # all at once: nobody gives up a row
        (
            4,
            1,
            16,
            1,
            False,
            (Shape(4, 8, 1, False, True), 4),
        ),  # a slot for each prompt under way, also of those parked
        (12, 4, 4, 1, False, (Shape(12, 4, 4, False, True), 4)),
        (8, 8, 64, 1, False, (Shape(8, 8, 8, False, True), 8)),  # four times the two prompts that are under way
        (8, 8, 64, 1, True, (Shape(8, 8, 8, False, True), 8)),
        (3, 1, 5, 4, False, (Shape(4, 8, 1, False, True), 4)),
    ],
)
def test_room_for_conversations(
    slots: int, group: int, prompts: int, multiple: int, anew: bool, expected: tuple[Shape, int]
) -> None:
    assert for_conversations(slots, group, prompts, multiple, anew) == expected


class Watched:
    """A schedule with a second, plain account of it, checked at every step."""

    def __init__(self, prompts: list[int], shape: Shape) -> None:
        self.prompts, self.shape = prompts, shape
        self.schedule = Schedule(prompts, shape)
        self.running: dict[int, tuple[int, int]] = {}  # request -> row, prefix_slot
        self.begun: list[int] = []
        self.holds: dict[int, int] = {}  # prompt slot -> prompt that was put there last
        self.fills = 0

    @property
    def waiting(self) -> list[int]:
        return [request for request in range(len(self.prompts)) if request not in self.begun]

    def needed(self, prompt: int) -> bool:
        return any(self.prompts[r] == prompt for r in (*self.running, *self.waiting))

    def admit(self) -> None:
        before = dict(self.holds)
        old = list(self.running)
        placed, new = self.schedule.admit()
        for slot, prompt in new:
            assert 0 <= slot < self.shape.prompts
            # Not over a prompt that some running row attends to, and not twice while it is held for someone.
            W = self.shape.slots_per_prompt
            assert not any(before.get(slot) == self.prompts[r] and self.running[r][1] // W == slot for r in old)
            assert prompt not in [p for s, p in self.holds.items() if s != slot and self.alive(s)]
            self.holds[slot] = prompt
            self.fills += 1
        for request, row, prefix_slot in placed:
            assert request not in self.begun
            assert self.holds[prefix_slot // self.shape.slots_per_prompt] == self.prompts[request]
            assert 0 <= row < self.shape.rows
            assert 0 <= prefix_slot < self.shape.prompts * self.shape.slots_per_prompt
            assert row == prefix_slot or not self.shape.fixed
            self.begun.append(request)
            self.running[request] = (row, prefix_slot)
        assert len({row for row, _ in self.running.values()}) == len(self.running)
        assert len({prefix_slot for _, prefix_slot in self.running.values()}) == len(self.running)
        assert {p.request: (p.row, p.prefix_slot) for p in self.schedule.placed.values()} == self.running
        assert self.schedule.queue == len(self.waiting)
        assert not self.could_place()

    def alive(self, slot: int) -> bool:
        """Whether rows stand in a prompt slot, or requests wait for its prompt."""
        stands = any(prefix_slot // self.shape.slots_per_prompt == slot for _, prefix_slot in self.running.values())
        return stands or any(self.prompts[r] == self.holds[slot] for r in self.waiting)

    def could_place(self) -> bool:
        """Whether a row idles while a waiting request has a free prefix slot of its prompt, or a free prompt slot."""
        if len(self.running) == self.shape.rows:
            return False
        used = Counter(prefix_slot // self.shape.slots_per_prompt for _, prefix_slot in self.running.values())
        held = {self.holds[slot]: slot for slot in self.holds if self.alive(slot)}
        for request in self.waiting:
            slot = held.get(self.prompts[request])
            if slot is None and len(held) < self.shape.prompts:
                return True
            if slot is not None and used[slot] < self.shape.slots_per_prompt:
                return True
        return False

    def end(self, request: int) -> None:
        row, _ = self.running.pop(request)
        self.schedule.release(row)


@settings(max_examples=200, deadline=None)
@given(prompts=PROMPTS, slots=st.integers(0, 20), multiple=st.sampled_from([1, 2, 4]), data=st.data())
def test_any_order_of_ends(prompts: list[int], slots: int, multiple: int, data: Any) -> None:
    watched = Watched(prompts, plan(prompts, slots, multiple))
    while True:
        watched.admit()
        if not watched.running:
            break
        ends = data.draw(st.lists(st.sampled_from(sorted(watched.running)), min_size=1, max_size=4, unique=True))
        for request in ends:
            watched.end(request)
    assert sorted(watched.begun) == list(range(len(prompts)))
    for prompt in set(prompts):
        of_prompt = [request for request in watched.begun if prompts[request] == prompt]
        assert of_prompt == sorted(of_prompt)
    # Each prompt went through the model once, for it was held while one of its requests waited or ran.
    assert watched.fills == len(set(prompts))
    assert not watched.schedule.placed
    assert sorted(watched.schedule.free_rows) == list(range(watched.shape.rows))
    assert sorted(watched.schedule.free_slots) == list(range(watched.shape.prompts))


def test_a_prompt_of_two_groups_has_two_slots() -> None:
    """Both groups run at once; a third waits for the first slot that is empty, or for rows."""
    schedule = Schedule("abaaaababaaa", lasting(8, 4, 3))
    placed, new = schedule.admit()
    assert [p.request for p in placed] == [0, 2, 3, 4, 5, 7, 9, 10]
    assert [p.prefix_slot // 3 for p in placed] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert new == [(0, "a"), (1, "a"), (2, "a")]
    for one in placed[3:6]:
        schedule.release(one.row)
    assert schedule.free_slots == [1, 3]  # although a request of "a" waits
    placed, new = schedule.admit()
    assert [(p.request, p.prefix_slot // 3) for p in placed] == [(11, 2), (1, 3), (6, 3)]
    assert new == [(3, "b")]


@settings(max_examples=100, deadline=None)
@given(prompts=PROMPTS, rows=st.integers(1, 9), slots=st.integers(1, 5), group=st.integers(1, 3), data=st.data())
def test_equal_groups_in_any_order_of_ends(prompts: list[int], rows: int, slots: int, group: int, data: Any) -> None:
    schedule = Schedule(prompts, lasting(rows, slots, group))
    begun = list[int]()
    while True:
        begun += [one.request for one in schedule.admit()[0]]
        if not schedule.placed:
            break
        of_slot = Counter(one.prefix_slot // schedule.shape.slots_per_prompt for one in schedule.placed.values())
        # No row and no slot is idle while a request waits that could have both.
        full = len(schedule.placed) == schedule.shape.rows
        assert full or not schedule.queue or len(of_slot) == schedule.shape.prompts
        for row in data.draw(st.lists(st.sampled_from(sorted(schedule.placed)), min_size=1, max_size=4, unique=True)):
            schedule.release(row)
    assert sorted(begun) == list(range(len(prompts)))
    assert sorted(schedule.free_slots) == list(range(schedule.shape.prompts))


def test_everything_at_once_is_placed_at_once() -> None:
    prompts = [0, 1, 2, 0, 1, 2]
    schedule = Schedule(prompts, plan(prompts, 0))
    placed, new = schedule.admit()
    assert [p.request for p in placed] == [0, 3, 1, 4, 2, 5]  # group by group
    assert [p.row for p in placed] == [p.prefix_slot for p in placed] == [0, 1, 2, 3, 4, 5]
    assert new == [(0, 0), (1, 1), (2, 2)]
    assert schedule.admit() == ([], [])


def test_a_freed_row_goes_to_the_next_request_by_hand() -> None:
    """Two rows, groups of two, three and one: who follows whom."""
    prompts = list("aabbbc")
    schedule = Schedule(prompts, plan(prompts, 2))
    placed, new = schedule.admit()
    assert ([p.request for p in placed], new) == ([0, 1], [(0, "a")])
    schedule.release(placed[1].row)
    after, new = schedule.admit()
    assert ([p.request for p in after], new) == ([2], [(1, "b")])
    assert after[0].row == placed[1].row
    schedule.release(after[0].row)
    after, new = schedule.admit()
    assert ([p.request for p in after], new) == ([3], [])  # b is there already
    schedule.release(placed[0].row)  # the last of a: its prompt slot is free
    after, new = schedule.admit()
    assert ([p.request for p in after], new) == ([4], [])
    schedule.release(after[0].row)
    after, new = schedule.admit()
    assert ([p.request for p in after], new) == ([5], [(0, "c")])
    assert schedule.queue == 0


def occupancy(prompts: list[int], lengths: list[int], slots: int) -> float:
    """Share of row-steps that do something while requests wait, one step at a time."""
    schedule = Schedule(prompts, plan(prompts, slots))
    left, live, steps = list(lengths), 0, 0
    while schedule.placed or schedule.queue:
        schedule.admit()
        if schedule.queue:
            steps, live = steps + 1, live + len(schedule.placed)
        for place in list(schedule.placed.values()):
            left[place.request] -= 1
            if left[place.request] == 0:
                schedule.release(place.row)
    return live / (schedule.shape.rows * steps)


@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_lengths_that_differ_by_sixteen_times(group: int) -> None:
    """Stragglers hold their prompt slots, and there are enough of them: few rows ever wait for one."""
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(3, 0.9, size=512)), 8, 128).astype(int).tolist()
    assert max(lengths) == 16 * min(lengths)
    prompts = [number // group for number in range(512)]
    found = occupancy(prompts, lengths, 16)
    assert found >= 0.95
    if group == 1:
        assert found == 1.0
    # With no spare slots, i.e. groups one after the other, it would not be reached.
    if group == 16:
        tight = Shape(16, 1, 16, False)
        schedule = Schedule(prompts, tight)
        schedule.admit()
        for place in list(schedule.placed.values())[:15]:
            schedule.release(place.row)
        assert schedule.admit() == ([], [])
