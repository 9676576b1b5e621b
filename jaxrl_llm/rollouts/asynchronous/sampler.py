"""Sampling beside training: groups in flight in a thread of their own, which new weights and new groups enter.

What is decoded goes on under the new weights, which come in between two turns: a turn is a chunk of decode steps, or
the release of answers from outside. Programs see nothing of it. Given the turns before which weights came in, all that
is sampled is determined.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.asynchronous.rule import NEVER
from jaxrl_llm.rollouts.asynchronous.staleness import LOOK
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.group_run import Group, GroupRun
from jaxrl_llm.rollouts.runtime.in_flight import InFlight
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Pool
from jaxrl_llm.rollouts.runtime.sample_numbers import SampleNumbers
from jaxrl_llm.sampling.requests import Completion
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError

logger = logging.getLogger("jaxrl_llm.rollouts")
FAILURES = 3  # of the devices, after which the run ends with the next
APART = 1 << 16  # sample numbers of a group; those of the next of the same prompt follow
Ended = Callable[[Sequence[tuple[GroupRun, int]]], object]  # called with the groups that end, and their chunks


class Entry(NamedTuple):
    """New weights, and the groups that are admitted with them."""

    driver: Driver | None  # with the engines of these weights, and their step; None: the weights stay
    flight: Sequence[tuple[GroupLog, Task]]
    until: int | None = None  # turn before which the next entry comes in, where that is known


class Taken(NamedTuple):
    """What a step takes at a time."""

    groups: list[Group]
    logs: Pool  # of the groups
    stats: list[Stats]  # of the engines that ended since the last time
    seconds: Mapping[str, float]  # since the last time: decoding, and idle at the bound
    entered: Sequence[Sequence[int]]  # by sampler, the turns before which entries came in, of those since the last time
    complete: int = 0  # groups that were complete when these were asked for
    waited: float = 0.0  # share of the time since the last groups were there, from 0 to 1


class _Asked(NamedTuple):
    """A call from another thread, made between two turns."""

    work: Callable[[], object]
    done: threading.Event


class Sampler:
    """Groups in flight in a thread, until it is closed. Its methods are called from one other thread.

    driver: of the first weights. ended, failed: called in the thread, with groups that are complete, and with what ends
    the thread. number, of: which of the samplers it is that draw the same prompts. keep: see `renew`.
    """

    def __init__(
        self, driver: Driver, ended: Ended, failed: Callable[[BaseException], object], number: int = 0, of: int = 1,
        keep: bool = False,
    ) -> None:  # fmt: skip
        self._ended, self._failed, self._number, self._of, self._keep = ended, failed, number, of, keep
        self._lock = threading.Lock()  # on the two lists
        self._asked: list[_Asked] = []
        self._entries: list[tuple[Entry, list[SampleNumbers]]] = []
        self._groups: dict[GroupKey, GroupRun] = {}  # not taken yet
        self._told = set[GroupKey]()  # of them, those that are complete, as `ended` was told
        self._numbered: dict[GroupKey, int] = {}  # sample number of each group in flight, or taken since weights came
        self._taken_keys = set[GroupKey]()  # of them
        self._entered = list[int]()
        self._until: int | None = None
        self._failures = 0
        self._error: BaseException | None = None
        self._over = False
        self._seconds = {"decoding": 0.0, "idle": 0.0}
        self._run = InFlight(driver, [], Rule(), [], {})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._in_thread, daemon=True, name="sampler")
        self._thread.start()

    def enter(self, entry: Entry) -> None:
        """Let new weights and groups come in between two turns: the next two, or where they are due."""
        # Here, where it is known which groups have been taken: in the thread it would depend on timing. With the same
        # weights, a group in place of one that was taken must not draw the same.
        if entry.driver is not None:
            self._numbered = {key: n for key, n in self._numbered.items() if key not in self._taken_keys}
            self._taken_keys = set()
        numbers = self._numbers(entry.flight)
        with self._lock:
            self._entries.append((entry, numbers))
        self._wake()

    def take(self, keys: Sequence[GroupKey]) -> Taken:
        """Take groups, which are complete. Raises what ended the thread."""
        found: list[Taken] = []
        self._call(lambda: found.append(self._taken(keys)))
        self._taken_keys |= set(keys)
        return found[0]

    def logs(self) -> Pool:
        """The logs of all groups that no step has taken, with the tokens drawn until now."""
        found: list[Pool] = []
        self._call(lambda: found.append(self._logs()))
        return found[0]

    def close(self) -> None:
        """End the thread."""
        self._over = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._run.wake)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _call(self, work: Callable[[], object]) -> None:
        asked = _Asked(work, threading.Event())
        with self._lock:
            self._check()
            self._asked.append(asked)
        self._wake()
        while not asked.done.wait(LOOK):
            self._check()
        self._check()

    def _numbers(self, flight: Sequence[tuple[GroupLog, Task]]) -> list[SampleNumbers]:
        """Numbers of the groups' samples, which no other group of the prompt in flight has."""
        for log, _ in flight:
            used = {first for key, first in self._numbered.items() if key.prompt_id == log.prompt_id}
            free = range(self._number * APART, APART * APART, self._of * APART)
            self._numbered[log.key] = next(n for n in free if n not in used)
        return [SampleNumbers(self._numbered[log.key], APART) for log, _ in flight]

    # What follows runs in the thread.

    def _in_thread(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        run = self._run
        try:
            run.open(lambda: False)
            while not self._over:
                self._come_in()
                before, started = run.turns, time.perf_counter()
                held = self._until is not None and run.turns >= self._until
                idle = held or await self._advance()
                await run.settle()  # so that groups whose last tokens were drawn are complete now, not a turn later
                if idle and not held and self._until not in (None, NEVER):
                    raise InputError(
                        "the order to repeat is of another run: all groups are complete before what comes in next; "
                        "repeat it with its own settings"
                    )
                if ended := [(group, chunk) for chunk, group in run.ended if group.before.key not in self._told]:
                    self._told |= {group.before.key for group, _ in ended}
                    self._ended(ended)
                if idle and not (self._asked or self._over or self._due()):
                    run.progressed.clear()
                    await run.progressed.wait()
                self._seconds["idle" if idle or run.turns == before else "decoding"] += time.perf_counter() - started
        except BaseException as error:
            self._error = error
        finally:
            await run.cancel()
            self._error = self._error or RuntimeError("the sampler was closed")
            self._failed(self._error)

    async def _advance(self) -> bool:
        """`InFlight.advance`, of which a failure on the devices is no end: the engines are made again, some times."""
        try:
            return await self._run.advance()
        except jax.errors.JaxRuntimeError as error:
            if self._failures >= FAILURES or "RESOURCE_EXHAUSTED" in str(error):
                raise
            self._failures += 1
            logger.warning("the sampler has failed and is started again: %s", str(error).splitlines()[0][:300])
            _restart(self._run)
            return False

    def _due(self) -> bool:
        return bool(self._entries) and (self._until is None or self._run.turns >= self._until)

    def _come_in(self) -> None:
        """Between two turns: make the calls of the other thread, and take in weights and groups that are due."""
        run = self._run
        while self._asked:
            asked = self._asked.pop(0)
            asked.work()
            asked.done.set()
        if not self._due():
            return
        with self._lock:
            entry, numbers = self._entries.pop(0)
        if entry.driver is not None:
            # Not within the lock here: the other thread asks for it while it has the driver's.
            renew(run, entry.driver, self._keep)
        self._until, self._entered = entry.until, [*self._entered, run.turns]
        new = run.new(entry.flight, numbers, {})
        self._groups |= {group.before.key: group for group in new}
        for group in new:
            run.begin(group)

    def _taken(self, keys: Sequence[GroupKey]) -> Taken:
        run = self._run
        groups = [self._groups.pop(key) for key in keys]
        self._told -= set(keys)
        forget_groups(run, groups)
        own = [running.stats for running in run.engines.values()]
        ended, run.stats = [one for one in run.stats if not any(one is other for other in own)], own
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        entered, self._entered = self._entered, list[int]()
        return Taken([one.group() for one in groups], tuple(one.log() for one in groups), ended, seconds, [entered])

    def _logs(self) -> Pool:
        note_running(self._run)
        to_come = [log for entry, _ in self._entries for log, _ in entry.flight]
        return (*(group.log() for group in self._groups.values()), *to_come)


def renew(run: InFlight, driver: Driver, keep: bool = False) -> None:
    """Go on with another driver, of new weights.

    Its engines take over what those in use have begun, and compute its keys, values and states again. keep: those in
    use go on instead, with caches that are of earlier weights.
    """
    with run.driver.lock:
        run.waiting += [] if keep else run.withdraw()
        run.driver = driver
        for draws, running in run.engines.items():
            stats = Stats()
            run.stats += [] if draws.temperature == 0 else [stats]
            engine = driver.make_engine((), draws, stats, running.engine)
            run.engines[draws] = running._replace(engine=engine, stats=stats)


def forget_groups(run: InFlight, groups: Sequence[GroupRun]) -> None:
    """Forget groups that are complete."""
    gone = {id(group) for group in groups}
    run.groups = [group for group in run.groups if id(group) not in gone]
    run.ended = [(chunk, group) for chunk, group in run.ended if id(group) not in gone]
    run.complete = [place for place, group in enumerate(run.groups) if any(group is one for _, one in run.ended)]


def _restart(run: InFlight) -> None:
    """Go on with new engines of the driver after those in use have failed, with the tokens that they gave."""
    note_running(run, suppress=(Exception,))
    for running in run.engines.values():
        run.waiting += [ticket for ticket in running.tickets.values() if ticket not in run.waiting]
    run.engines = {}


def note_running(run: InFlight, suppress: tuple[type[Exception], ...] = ()) -> None:
    """Note what the engines have drawn of the calls that are not answered. suppress: see `contextlib.suppress`."""
    for running in run.engines.values():
        engine: Any = running.engine  # `Engine`, not one that other hosts mirror
        with contextlib.suppress(*suppress):
            for number, tokens in engine.running():
                ticket = running.tickets[number]
                ticket.note(Completion(number, tokens, False, ticket.until))
