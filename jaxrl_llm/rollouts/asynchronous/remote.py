"""Samplers in programs of their own, on devices of other machines, which the learner gives weights and groups.

They dial the learner and answer its calls (`session`). Groups that are complete come to the learner at once. Where a
sampler is gone, another that dials has its groups that were not complete, and goes on from what is known of them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.distributed.peers import LOST, Peer, PeerListener
from jaxrl_llm.rollouts.asynchronous.sampler import Taken
from jaxrl_llm.rollouts.asynchronous.samplers import Flight, Scene, StepInputs
from jaxrl_llm.rollouts.asynchronous.session import CompleteGroup, packed
from jaxrl_llm.rollouts.asynchronous.staleness import LOOK, Waitlist
from jaxrl_llm.rollouts.runtime.multihost_gather import combined_stats
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Pool
from jaxrl_llm.sampling.weights.layouts import LoopOptions
from jaxrl_llm.sampling.weights.sent import Outlet, Part, send_adapters, send_all
from jaxrl_llm.utils.errors import InputError, several
from jaxrl_llm.utils.process import interruptible, stop_if

logger = logging.getLogger("jaxrl_llm.rollouts")


@dataclass(eq=False)
class _Remote:
    """One of the samplers, with the groups that no step has taken of it."""

    number: int
    peer: Peer | None = None  # None: it is not there
    outlet: Outlet | None = None
    options: LoopOptions | None = None
    groups: dict[GroupKey, tuple[GroupLog, Task]] = field(default_factory=dict)
    complete: dict[GroupKey, CompleteGroup] = field(default_factory=dict)  # of them
    before: set[GroupKey] = field(default_factory=set)  # of these, those of a program whose place this one has

    @property
    def flight(self) -> Flight:
        return [both for key, both in self.groups.items() if key not in self.complete]


class RemoteSamplers:
    """The samplers of a host, each in a program of its own; see `Samplers`.

    greeting: what a program must know to work for this run.
    """

    def __init__(
        self, scene: Scene, waitlist: Waitlist, listener: PeerListener, count: int, greeting: Any
    ) -> None:  # fmt: skip
        self.count, self._scene, self._waitlist = count, scene, waitlist
        self._listener, self._greeting = listener, greeting
        self._remotes = [_Remote(number) for number in range(count)]
        self._given: StepInputs | None = None  # of the step at hand
        self._began, self._replaced, self._open = False, False, True

    def enter(self, given: StepInputs | None, flight: Flight, until: Sequence[int | None]) -> None:
        """See `Samplers`. Each group goes to the one with the fewest of those that are there."""
        first, self._began = not self._began, True
        self._given = given or self._given
        if first:
            self._wait_for_all()
        elif given is not None:
            self.mend()
        own: list[list[tuple[GroupLog, Task]]] = [[] for _ in self._remotes]
        for log, task in flight:
            least = min(self._there() or self._remotes, key=lambda one: len(one.groups))
            least.groups[log.key] = log, task
            own[least.number].append((log, task))
        if given is not None:
            self._bring(given, self._there(), adapters=self._scene.setup.frozen and not first)
        told = None if given is None else packed(given)
        self._all(self._there(), "enter", lambda one: (told, own[one.number], until[one.number]))

    def take(self, keys: Sequence[GroupKey]) -> Taken:
        """See `Samplers`."""
        own = [[key for key in keys if key in one.groups] for one in self._remotes]
        known = [[key for key in own[one.number] if key not in one.before] for one in self._remotes]
        answers = self._all(self._there(), "take", lambda one: (known[one.number],))
        ended = {}
        for one in self._remotes:
            for key in own[one.number]:
                ended[key] = one.complete.pop(key)
                del one.groups[key]
        for _, counted in answers.values():
            self._scene.streamed.count(counted)
        parts = {number: taken for number, (taken, _) in answers.items()}
        seconds = {
            name: float(np.mean([one.seconds[name] for one in parts.values()] or [0.0]))
            for name in ("decoding", "idle")
        }
        entered = [parts[number].entered[0] if number in parts else [] for number in range(self.count)]
        stats = combined_stats([one.stats for one in parts.values()])
        return Taken([ended[key].group for key in keys], tuple(ended[key].log for key in keys), stats, seconds, entered)

    def logs(self) -> Pool:
        """See `Samplers`. Of a program that is gone, they are those of the last time."""
        for number, logs in self._all(self._there(), "logs", lambda one: ()).items():
            groups = self._remotes[number].groups
            groups |= {log.key: (log, groups[log.key][1]) for log in logs}
        return tuple(log for one in self._remotes for log, _ in one.groups.values())

    def mend(self) -> None:
        """See `Samplers`. Not on several hosts, which make weights together."""
        gone = [one for one in self._remotes if one not in self._there()]
        for one in gone if self._scene.setup.hosts.count == 1 else ():
            if (connection := self._listener.next()) is not None:
                self._begin([(one, connection)])
                self._go_on(one)

    def end_step(self) -> bool:
        """See `Samplers`."""
        found, self._replaced, self._given = self._replaced, False, None
        return found

    def close(self) -> None:
        """See `Samplers`."""
        self._open = False
        for one in self._there():
            assert one.peer is not None
            one.peer.close()
        self._listener.close()

    def _there(self) -> list[_Remote]:
        return [one for one in self._remotes if one.peer is not None and not one.peer.gone]

    def _wait_for_all(self) -> None:
        """Begin with as many programs as there are to be."""
        found, told = list[Connection](), False
        with interruptible() as interrupted:
            while len(found) < self.count:
                if (connection := self._listener.next()) is not None:
                    found.append(connection)
                    continue
                if not told:
                    told = True
                    logger.warning(
                        "the run waits for %s: jaxrl sampler %s", several(self.count, "sampler"), self._listener.address
                    )
                stop_if(interrupted())
                time.sleep(LOOK)
        self._begin(list(zip(self._remotes, found, strict=True)))

    def _begin(self, given: Sequence[tuple[_Remote, Connection]]) -> None:
        """Set programs up. InputError where one has other settings, files or code."""
        hosts = self._scene.setup.hosts
        for one, connection in given:
            one.peer = Peer(connection, partial(self._said, one), partial(self._lost, one))
            one.outlet = Outlet(one.peer.host)
        ones = [one for one, _ in given]
        units, first = hosts.units * self.count, hosts.index * self.count
        begun = self._all(ones, "begin", lambda one: (self._greeting, first + one.number, units))
        for one in ones:
            one.options = begun.get(one.number, one.options)
        self._all([one for one in ones if one in self._there()], "connect", lambda one: (one.outlet.address,))

    def _go_on(self, one: _Remote) -> None:
        """Let a program that came in place of another go on with its groups."""
        if one not in self._there() or self._given is None:
            return
        self._replaced = True
        one.before, flight = set(one.complete), one.flight
        self._waitlist.admit(log.key for log, _ in flight)
        self._bring(self._given, [one], adapters=False)
        told = packed(self._given)
        self._all([one], "enter", lambda one: (told, flight, None))

    def _bring(self, given: StepInputs, to: Sequence[_Remote], adapters: bool) -> None:
        """Send weights, each part to all programs at a time. adapters: alone, where that can be."""

        def part(which: Part, arrays: Any) -> None:
            there = [one for one in to if one in self._there()]
            self._all(there, "part", lambda one: (which, one.outlet.offer(arrays)))

        if adapters and send_adapters(given.params, part):
            return
        options = {one.options for one in to if one.options is not None}
        if len(options) > 1:
            raise InputError(
                "the samplers have devices of different kinds, which need different weights: give one kind"
            )
        for one in options:
            send_all(self._scene.setup.policy, given.params, one, part)

    def _all(
        self, ones: Sequence[_Remote], name: str, arguments: Callable[[Any], tuple[Any, ...]]
    ) -> dict[int, Any]:  # fmt: skip
        """The answers of programs to a call, by their numbers, without those that are gone."""
        asked, found = list[_Remote](), dict[int, Any]()
        for one in ones:
            assert one.peer is not None
            try:
                one.peer.ask(name, *arguments(one))
                asked.append(one)
            except LOST:
                one.peer.gone = True
        for one in asked:
            assert one.peer is not None
            try:
                found[one.number] = one.peer.answer()
            except LOST:
                one.peer.gone = True
        return found

    def _said(self, one: _Remote, what: Any) -> None:
        """In a thread: groups are complete, or the sampler has failed."""
        if isinstance(what, Exception):
            self._waitlist.fail(what)
            return
        one.complete |= {ended.log.key: ended for ended in what}
        self._waitlist.complete((ended.log.key, ended.chunk) for ended in what)

    def _lost(self, one: _Remote) -> None:
        """In a thread: a program is gone."""
        if not self._open:
            return
        if self._scene.setup.hosts.count > 1:
            self._waitlist.fail(RuntimeError("a sampler is gone: start it again, and resume the run"))
        else:
            logger.warning(
                "sampler %d is gone: its groups wait for another, jaxrl sampler %s", one.number, self._listener.address
            )
