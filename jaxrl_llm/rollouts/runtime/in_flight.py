"""Groups in flight: their programs, and the engines that draw their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.program_host import Completes, Draws, ends_the_run
from jaxrl_llm.rollouts.runtime.admission import Admitted, Collected, Rule
from jaxrl_llm.rollouts.runtime.external_calls import OutsideCalls, hold
from jaxrl_llm.rollouts.runtime.group_run import GroupRun, Ticket
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Held
from jaxrl_llm.rollouts.runtime.sample_numbers import SampleNumbers
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import compiles, count_compiles, interruptible, stop_if

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.runtime.driver import Driver

logger = logging.getLogger("jaxrl_llm.rollouts")

# Iterations of the event loop without progress after which all programs wait. A gather takes up to three until what
# follows it has begun, and programs have some within each other.
SETTLED = 32
LOOKS = 0.5  # seconds between two looks for a signal while all programs wait


class _Running(NamedTuple):
    engine: Completes
    tickets: dict[int, Ticket]  # that it has not answered, by the numbers of their requests
    stats: Stats


class InFlight:
    """The groups in flight of one call of `Driver.run`, or of a whole run."""

    def __init__(
        self, driver: Driver, flight: Sequence[tuple[GroupLog, Task]], rule: Rule, numbers: Sequence[SampleNumbers],
        held: Mapping[GroupKey, Held],
    ) -> None:  # fmt: skip
        self.driver, self.rule, self.stats = driver, rule, list[Stats]()
        self.groups = list[GroupRun]()
        self.new(flight, numbers, held)
        self.chunks = 0  # decoded so far
        self.judged = -1  # chunks decoded when the complete groups were last admitted
        self.ended: list[tuple[int, GroupRun]] = []  # each group that is complete, and the chunk after which it was
        self.complete: list[int] = []  # places of the groups that the step takes
        self.waiting: list[Ticket] = []  # not submitted to an engine yet
        self.parked: list[Ticket] = []  # paused until the next segment
        self.engines: dict[Draws, _Running] = {}
        self.outside = OutsideCalls(driver.rollout.demands.max_wait_steps, self.moved)
        self.moves = 0  # number of times that a program asked for tokens, got an answer, or ended
        self.turns = 0  # number of times that a chunk was decoded, or answers from outside were released
        self.progressed = asyncio.Event()

    def new(
        self, flight: Sequence[tuple[GroupLog, Task]], numbers: Sequence[SampleNumbers], held: Mapping[GroupKey, Held]
    ) -> list[GroupRun]:
        """Take in groups, whose programs are still to begin."""
        numbered = zip(flight, numbers, strict=True)
        groups = [GroupRun(self, log, task, own, held.get(log.key)) for (log, task), own in numbered]
        self.groups += groups
        return groups

    def moved(self) -> None:
        """Note that a program made progress."""
        self.moves += 1
        self.wake()

    def wake(self) -> None:
        """End a wait for programs."""
        self.progressed.set()

    def take(self, ticket: Ticket) -> None:
        """Queue a program's request for tokens."""
        self.waiting.append(ticket)
        self.moved()

    async def main(self) -> Collected:
        """Run all programs."""
        count_compiles()
        before, began = compiles()[0], time.perf_counter()
        with interruptible() as interrupted:
            self.open(interrupted)
            try:
                while not await self.advance():
                    stop_if(interrupted())
                await self._answered()
                self.withdraw()
                logs = [group.log() for group in self.groups]
            finally:
                await self.cancel()
                self.let_go()
        if self.stats:
            self.stats[0].seconds = time.perf_counter() - began - sum(stats.seconds for stats in self.stats[1:])
            self.stats[0].compiles = compiles()[0] - before
        complete = set(self.complete)
        places = list(range(len(logs))) if self.rule.train_unfinished else sorted(complete)
        groups = [self.groups[place].group() for place in places]
        left = [place for place in range(len(logs)) if place not in complete]
        with_objects = [(logs[place], self.groups[place].held) for place in left if self.groups[place].held]
        held = {log.key: Held(log.recorded, dict(objects)) for log, objects in with_objects}
        return Collected(groups, tuple(logs[place] for place in left), self.stats, places, left, held)

    def open(self, interrupted: Callable[[], bool]) -> None:
        """Begin the programs, in the event loop that is running. interrupted: whether Ctrl-C was heard."""
        self.interrupted = interrupted
        for group in self.groups:
            self.begin(group)

    def begin(self, group: GroupRun) -> None:
        """Begin the program of a group."""
        group.begin(partial(self._ended, group))

    def withdraw(self) -> list[Ticket]:
        """Give up the engines, and note what they have drawn. Returns the calls that are not answered."""
        open_ones = []
        for running in self.engines.values():
            for completion in running.engine.withdraw():
                ticket = running.tickets[completion.index]
                if not ticket.note(completion):
                    open_ones.append(ticket)
        self.engines = {}
        return open_ones

    def let_go(self) -> None:
        """Let go of the engines and of what makes them, and so of the weights.

        Groups and their calls refer to each other and to this, so that nothing else frees it before Python next looks
        for cycles, which may be many steps later.
        """
        self.engines, self.driver = {}, replace(self.driver, make_engine=_over)

    async def advance(self) -> bool:
        """Make progress. True when the rule is satisfied or all groups are over."""
        await self.settle()
        for group in self.groups:
            if ends_the_run(group.error, self.driver.strict):
                raise group.error
        wanted, over = self.rule.wanted, all(group.over for group in self.groups)
        if self.driver.rollout.demands.meets and all(group.over or group.at_meeting for group in self.groups):
            return hold(self.groups, self.driver.meet)
        if wanted is None and over:
            return True
        # Once for each chunk, which is the same on all hosts. A segment always covers all groups in flight.
        if wanted is not None and (over or (not self.rule.segment_tokens and self.judged < self.chunks)):
            found = self._admit(over)
            done = found.over or found.total >= (1 if self.rule.segment_tokens else wanted)
            if done or over:
                return done
        released = self.outside.release(self._idle)
        if released is not None:
            self.turns += released
            if not released:
                await self._wait()
        elif self._decode():
            pass
        elif self.parked and not any(group.outside for group in self.groups):
            complete = len(self.complete) if wanted is None else self._admit(False).total
            if complete or self.rule.train_unfinished:
                return True
            self.waiting, self.parked, self.engines = self.parked, [], {}
        else:
            await self._wait()
        return False

    async def _answered(self) -> None:
        """Wait for the answers of what unfinished programs hold, so that the step that goes on with them knows it.

        All of them are asked for in this step, so that logs do not depend on how long environments take.
        """
        while any(group.held and group.outside and not group.over for group in self.groups):
            if self.outside.release(True) is False:
                await self._wait()
            await self.settle()

    @property
    def _idle(self) -> bool:
        if self.outside.ahead is None and not self.engines and self.outside.waits:
            return True  # the first requests size an engine: all programs get as far as they can
        asked = any(not ticket.group.over for ticket in self.waiting)
        return not asked and not any(running.engine.busy for running in self.engines.values())

    async def settle(self) -> None:
        """Let programs run until all of them wait."""
        quiet = 0
        while quiet < SETTLED:
            before = self.moves
            await asyncio.sleep(0)
            quiet = quiet + 1 if self.moves == before else 0

    async def _wait(self) -> None:
        """Wait until a program makes progress. At the time limit, programs that wait for nothing known fail."""
        self.progressed.clear()
        until = time.monotonic() + self.driver.time_limit
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.progressed.wait(), min(left, LOOKS))
            stop_if(self.interrupted())
            if self.progressed.is_set():
                return
        for group in self.groups:
            # External calls have time limits of their own, and waiting for the engine is not limited.
            if not (group.over or group.outside or group.sampling or group.meeting):
                group.fail(f"waited for more than {self.driver.time_limit:g} s")

    def _decode(self) -> bool:
        """Submit the waiting requests and decode one chunk. False if there is nothing to decode."""
        # In the order of the groups in flight, whichever external call answered first.
        place = {id(group): number for number, group in enumerate(self.groups)}
        tickets = sorted(
            (ticket for ticket in self.waiting if not ticket.group.over),
            key=lambda ticket: (place[id(ticket.group)], ticket.call),
        )
        self.waiting = tickets
        kinds = {ticket.draws for ticket in tickets}
        # The run's own engine comes first, whose statistics are those of the first token.
        for draws in sorted(kinds, key=_order):
            asked = [(one, one.request(self.rule.segment_tokens)) for one in tickets if one.draws == draws]
            if draws not in self.engines:
                stats = Stats(began=time.perf_counter())
                self.stats += [] if draws.temperature == 0 else [stats]
                with self.driver.lock:
                    engine = self.driver.make_engine([request for _, request in asked], draws, stats)
                self.engines[draws] = _Running(engine, {}, stats)
            for ticket, request in asked:
                running = self.engines[draws]
                running.tickets[running.engine.submit(request)] = ticket
            self.waiting = [one for one in self.waiting if one.draws != draws]
        busy = [running for running in self.engines.values() if running.engine.busy]
        chunk, taken = self.outside.steps(self.driver.chunk), int(bool(busy))
        for engine, open_ones, stats in busy:
            before = stats.steps
            with self.driver.lock:
                completions = engine.step(chunk)
            for completion in completions:
                ticket = open_ones.pop(completion.index)
                if not ticket.note(completion):
                    self.parked.append(ticket)
            taken = max(taken, stats.steps - before)
        self.outside.clock += taken
        self.chunks, self.turns = self.chunks + bool(busy), self.turns + bool(busy)
        return bool(busy)

    def _admit(self, over: bool) -> Admitted:
        """Let the step take the groups that are complete, as many as it wants."""
        assert self.rule.wanted is not None
        ended = [(chunk, self.groups.index(group)) for chunk, group in self.ended]
        found, self.judged = self.driver.admit(ended, over, self.rule.wanted), self.chunks
        new, self.complete = [place for place in found.places if place not in self.complete], found.places
        if self.driver.on_group is not None:
            for place in new:
                self.driver.on_group(place, self.groups[place].group())
        return found

    def _ended(self, group: GroupRun) -> None:
        self.moved()
        if ends_the_run(group.error, self.driver.strict):
            return
        if group.error is not None:
            logger.warning(
                "the rollout %s failed on prompt %d, whose group counts as failed: %s",
                *(self.driver.rollout.name, group.task.prompt_id, group.error),
            )
        self.ended.append((self.chunks, group))
        if self.rule.wanted is None:
            place = self.groups.index(group)
            self.complete.append(place)
            if self.driver.on_group is not None:
                self.driver.on_group(place, group.group())

    async def cancel(self) -> None:
        """End the programs."""
        tasks = [group.running for group in self.groups if group.running is not None]
        for task in tasks:
            task.cancel()
        self.outside.end()
        await asyncio.gather(*tasks, return_exceptions=True)


def _over(*arguments: object) -> Completes:
    raise InputError("the groups are no longer in flight: nothing is sampled for them")


def _order(draws: Draws) -> tuple[bool, int, bool, float]:
    """The run's own engine comes first, then its others, those of other policies last."""
    place = -1 if draws.snapshot is None else draws.snapshot
    return draws.reference, place, draws.temperature is not None, draws.temperature or 0.0
