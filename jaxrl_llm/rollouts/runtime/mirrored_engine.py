"""One engine on the devices of several hosts: the first host of a unit decides, and the others make the same calls.

The programs of such an engine run on the devices of all hosts of the unit, each of which must start them, in the same
order. What they are called with comes from rollout programs, rewards, environments and time limits. These run on the
first host only, which tells the others each call before it makes it. What the engine itself decides (rows, prompts,
when a row ends) follows from the calls and from numbers that all hosts have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from jaxrl_llm.distributed.hosts import Hosts
from jaxrl_llm.rollouts.program_host import Completes, Draws, MakeEngine
from jaxrl_llm.rollouts.runtime.admission import Admit, Admitted, Collected
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.stats import Stats


class _Own(NamedTuple):
    """What a host calls."""

    make: MakeEngine
    admit: Admit
    engines: dict[int, Completes]


Call = Callable[[_Own], Any]  # picklable


def _make(number: int, requests: list[Request], draws: Draws, stats: Stats, kept: list[int], own: _Own) -> None:
    """kept: engines that are still in use."""
    for other in own.engines.keys() - set(kept):
        del own.engines[other]
    own.engines[number] = own.make(requests, draws, stats)


def _step(number: int, requests: list[Request], chunk: int, own: _Own) -> list[Completion]:
    """requests: submitted since the last step."""
    for request in requests:
        own.engines[number].submit(request)
    return own.engines[number].step(chunk)


def _withdraw(number: int, own: _Own) -> list[Completion]:
    return own.engines[number].withdraw()


def _join(own: _Own) -> None:
    """Take part in an exchange of all hosts, of complete groups or a meeting, without groups of its own."""
    own.admit([], True, 0)


def take_part(hosts: Hosts) -> None:
    """On the first host of a unit, before an exchange of all hosts: the others of the unit take part in it."""
    if hosts.together > 1:
        hosts.gather_in_unit(_join)


class _Led:
    """An engine whose calls the other hosts make too."""

    def __init__(self, number: int, own: _Own, call: Callable[[Call], Any]) -> None:
        self.number, self.own, self.call = number, own, call
        self.count, self.asked = 0, list[Request]()

    @property
    def busy(self) -> bool:
        return bool(self.asked) or self.own.engines[self.number].busy

    def submit(self, request: Request) -> int:
        """Queue a request until the next step: an engine that grows for it runs programs."""
        self.asked.append(request)
        self.count += 1
        return self.count - 1

    def step(self, chunk: int) -> list[Completion]:
        asked, self.asked = self.asked, []
        found: list[Completion] = self.call(partial(_step, self.number, asked, chunk))
        return found

    def withdraw(self) -> list[Completion]:
        assert not self.asked  # the driver steps an engine right after it submits
        found: list[Completion] = self.call(partial(_withdraw, self.number))
        return found


def in_lockstep(
    hosts: Hosts, make: MakeEngine, admit: Admit, run: Callable[[MakeEngine, Admit], Collected]
) -> Collected:
    """run(make, admit) on the first host of each unit; the others make its calls, and have collected nothing.

    All hosts must call this, with the same functions but for what `admit` exchanges.
    """
    if hosts.together == 1:
        return run(make, admit)
    own = _Own(make, admit, {})
    if not hosts.leads:
        while (call := hosts.gather_in_unit(None)[0]) is not None:
            call(own)
        return Collected([], (), [], [], [])

    def tell(call: Call) -> Any:
        hosts.gather_in_unit(call)
        return call(own)

    numbers, made = itertools.count(), WeakValueDictionary[int, _Led]()

    def make_led(requests: Sequence[Request], draws: Draws, stats: Stats, before: object = None) -> Completes:
        assert before is None  # hosts that sample as one do not sample beside updates
        number = next(numbers)
        tell(partial(_make, number, list(requests), draws, stats, sorted(made)))
        made[number] = led = _Led(number, own, tell)
        return led

    def admit_led(ended: Sequence[tuple[int, int]], over: bool, wanted: int) -> Admitted:
        take_part(hosts)
        return admit(ended, over, wanted)

    found = run(make_led, admit_led)
    hosts.gather_in_unit(None)
    return found
