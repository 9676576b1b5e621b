"""How much of a program's collectives its schedule hides, read off the text of a program compiled for a TPU.

The text lists the instructions of each computation in the order in which they run. A collective that stands there as
one instruction keeps all others waiting. An asynchronous one starts at one instruction and must have ended at another,
and what works in between hides it: for a pair such as "collective-permute-start" and "-done", or a collective that the
SparseCores run, everything; for one that fusions carry on beside their own products ("async-collective-start"), only
these fusions, since their program is what moves it from step to step.

Every collective takes the bytes that a device sends, over the rate of the chip's links; between slices, over that of
the network. Collectives that are under way at the same time share these: a second of work hides a second of one of
them, the one that started first. What is left of a collective where it must have ended is exposed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrl_llm.distributed.chips import NETWORK, Chip
from jaxrl_llm.plan.program.collectives import BETWEEN, CARRY, END, START, part_of_collective, sent_by
from jaxrl_llm.plan.program.cycles import KERNEL, scopes_of, seconds_of_one
from jaxrl_llm.plan.program.text import Computation, Executed, Instruction, called_by, computations, nested_instructions

_CALLS = ("async-start", "call-start")
_CHANNEL = re.compile(r"channel_id=(\d+)")


class Scheduled(NamedTuple):
    """Seconds of a program on each device."""

    work: float  # all instructions but collectives, one after another
    links: float  # all collectives, one after another
    exposed: float  # of the collectives, where nothing else runs
    sources: dict[str, float]  # the exposed seconds by the collective's kind and instruction

    @property
    def seconds(self) -> float:
        """Of the program as it is scheduled."""
        return self.work + self.exposed


def scheduled(text: str, chip: Chip, slices: Sequence[int] = (0,)) -> Scheduled:
    """Seconds of a program's work and collectives, in the order of its text; loops as often as they run.

    slices: of each device of the program, in order.
    """
    found, entry = computations(text)
    run = _Run(chip, slices, found)
    run.visit(entry)
    for name in list(run.under_way):  # what nothing ends
        run.end(name)
    sources = dict(sorted(run.exposed.items(), key=lambda item: -item[1]))
    return Scheduled(run.work, run.links, sum(sources.values()), sources)


@dataclass
class _UnderWay:
    """A collective between its start and its end."""

    source: str
    left: float  # seconds
    network: bool  # or the links of a slice
    carried: bool  # hidden by the fusions that carry it on only


@dataclass
class _Run:
    """What has passed of a program's run."""

    chip: Chip
    slices: Sequence[int]
    found: dict[str, Computation]
    work: float = 0.0
    links: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    under_way: dict[str, _UnderWay] = field(default_factory=dict)  # by channel or name, the first to start first

    def visit(self, name: str) -> None:
        """Run a computation once."""
        inside = self.found.get(name, {})
        for one in inside.values():
            self.step(one, inside)

    def step(self, one: Instruction, inside: Computation) -> None:
        """Run an instruction, with all that it calls."""
        carried = set[str]()
        if one.kind.endswith("-done"):
            self.end(_started(one, inside))
        elif one.kind in ("fusion", *_CALLS):
            carried = self.inner(one)
        elif sent := sent_by(Executed(one, 1, inside, None), self.slices):
            self.start(one.name, one, sent, carried=False)
            if not (one.kind.endswith("-start") or one.kind == "send"):
                self.end(one.name)
        else:
            for name, times in called_by(one, self.found):
                self.turns(name, times)
        self.pass_by(seconds_of_one(one, self.chip), carried)

    def inner(self, one: Instruction) -> set[str]:
        """Start and end the collectives within a fusion or an asynchronous call. Returns those that it carries on."""
        carried = set[str]()
        for each in nested_instructions(one, self.found):
            part = part_of_collective(each.instruction, each.computation)
            channel = _CHANNEL.search(each.instruction.line)
            key = f"channel {channel[1]}" if channel else each.instruction.name
            sent = sent_by(each, self.slices)
            if sent and one.kind in _CALLS:
                self.start(one.name, each.instruction, sent, carried=False)
            elif sent:
                self.start(key, each.instruction, sent, carried=part == START)
                if part != START:
                    self.end(key)
            elif part == CARRY:
                carried.add(key)
            elif part == END:
                self.end(key)
            # Cycles stand beside the fusion itself, but not those of a kernel within it.
            if each.fusion is None or KERNEL in each.instruction.line:
                self.pass_by(seconds_of_one(each.instruction, self.chip), carried)
        return carried

    def turns(self, name: str, times: int) -> None:
        """Run a computation so often: one by one until nothing of what is under way changes, then all at once."""
        for turn in range(times):
            work, links, exposed, left = self.work, self.links, dict(self.exposed), self.left()
            self.visit(name)
            if self.left() == left:
                rest = times - turn - 1
                self.work += rest * (self.work - work)
                self.links += rest * (self.links - links)
                for source, seconds in self.exposed.items():
                    self.exposed[source] = seconds + rest * (seconds - exposed.get(source, 0.0))
                return

    def left(self) -> dict[str, float]:
        """Seconds left of what is under way."""
        return {name: each.left for name, each in self.under_way.items()}

    def start(self, key: str, one: Instruction, sent: tuple[str, int], *, carried: bool) -> None:
        """Begin a collective."""
        kind, size = sent
        network = kind.endswith(BETWEEN)
        rate = (NETWORK if network and self.chip.links else self.chip.links) * 1e9
        seconds = size / rate if rate else 0.0
        self.links += seconds
        before = self.under_way.pop(key, None)  # a call may hold several
        left = seconds + (before.left if before else 0.0)
        self.under_way[key] = _UnderWay(f"{kind}: {scopes_of(one)}", left, network, carried)

    def pass_by(self, seconds: float, carried: set[str]) -> None:
        """Work so long, beside which collectives run."""
        self.work += seconds
        free = {True: seconds, False: seconds}
        for key, each in self.under_way.items():
            if not each.carried or key in carried:
                part = min(free[each.network], each.left)
                free[each.network] -= part
                each.left -= part

    def end(self, key: str) -> None:
        """Wait for a collective; for none if nothing of this name is under way."""
        if each := self.under_way.pop(key, None):
            self.exposed[each.source] = self.exposed.get(each.source, 0.0) + each.left


def _started(one: Instruction, inside: Computation) -> str:
    """The name of the instruction that began what a "-done" ends."""
    while one.kind.endswith(("-done", "-update")) and one.operands and one.operands[0] in inside:
        one = inside[one.operands[0]]
    return one.name
