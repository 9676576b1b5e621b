"""Units of hosts that sample in lock-step: the first decides, and the engines of the others get the same calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, Ran, begin
from simulated_hosts import on_hosts
from test_exchange import batch_of, scored

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.runtime.admission import Collected, Rule, admit_first
from jaxrl_llm.rollouts.runtime.multihost_gather import admit_on, in_lockstep, of_all_hosts
from jaxrl_llm.rollouts.runtime.replay_log import Pool


class Recorded(FakeEngine):
    """A fake engine that writes down its calls."""

    def __init__(self, slots: int, step: int, log: list[Any]) -> None:
        super().__init__(slots, step)
        self.log = log

    def submit(self, request: Any) -> int:
        self.log.append(("submit", request.prompt_id, request.sample, request.begun.size))
        return super().submit(request)

    def step(self, chunk: int) -> Any:
        self.log.append(("step", chunk, len(self.requests)))
        return super().step(chunk)

    def withdraw(self) -> Any:
        self.log.append(("withdraw", len(self.requests)))
        return super().withdraw()


async def _uneven(tools: Tools, task: Task) -> Any:
    """A completion whose length comes from outside, and differs from call to call."""
    limit = await tools.call(_answer, task.prompt_id, name="limit")
    return [await tools.sample(task.prompt, number=0, limit=limit)]


asked: list[int] = []


def _answer(prompt: int) -> int:
    asked.append(prompt)
    return 2 + len(asked)


def a_round(flight: Pool, rule: Rule, hosts: Hosts = ALONE, slots: int = 3) -> tuple[Collected, list[list[Any]]]:
    """What all hosts have at the end, and the calls of this host's engines."""
    places, logs = hosts.share(range(len(flight))), list[list[Any]]()

    def within(make: Any, admit: Any, run: Any) -> Collected:
        def recorded(requests: Any, greedy: bool, stats: Any) -> FakeEngine:
            logs.append([("make", len(requests), greedy)])
            return Recorded(slots, 0, logs[-1])

        return in_lockstep(hosts, recorded, admit, run)

    admit = admit_first if hosts.count == 1 else admit_on(hosts, places)
    found = Ran(tuple(flight[place] for place in places), rule, within=within, admit=admit).found
    if hosts.count > 1:
        found, _ = of_all_hosts(hosts, places, found, scored(found), batch_of)
    return found, logs


@pytest.mark.parametrize(("count", "together"), [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("rule", [Rule(), Rule(2), Rule(3, 4)])
def test_the_hosts_of_a_unit_make_the_same_calls(count: int, together: int, rule: Rule) -> None:
    flight = begin(range(5), 2)
    alone, _ = a_round(flight, rule, slots=100)
    hosts = on_hosts(count, partial(a_round, flight, rule, slots=100), together)
    for index, (found, logs) in enumerate(hosts):
        assert logs
        assert logs == hosts[index // together * together][1]  # those of the host that leads
        assert [one.task.prompt_id for one in found.groups] == [one.task.prompt_id for one in alone.groups]
        assert (found.places, found.left_places) == (alone.places, alone.left_places)
        for one, other in zip(found.groups, alone.groups, strict=True):
            for episode, same in zip(one.episodes, other.episodes, strict=True):
                np.testing.assert_array_equal(episode.own.token, same.own.token)
    if count > together:
        assert hosts[0][1] != hosts[together][1]


def test_what_comes_from_outside_is_asked_for_once() -> None:
    asked.clear()
    rollout = Rollout(_uneven, "uneven")

    def one(hosts: Hosts) -> tuple[int, list[Any]]:
        log: list[Any] = []

        def within(make: Any, admit: Any, run: Any) -> Collected:
            return in_lockstep(hosts, lambda requests, greedy, stats: Recorded(9, 0, log), admit, run)

        found = Ran(begin(range(3), 1), Rule(), rollout, within=within).found
        return len(found.groups), log

    (groups, log), (none, same) = on_hosts(2, one, 2)
    assert (groups, none) == (3, 0)
    assert log == same
    assert sorted(asked) == [0, 1, 2]


def test_shares_are_those_of_units() -> None:
    found = on_hosts(4, lambda hosts: (hosts.share(range(5)), hosts.leads, hosts.units), 2)
    assert found == [([0, 2, 4], True, 2), ([0, 2, 4], False, 2), ([1, 3], True, 2), ([1, 3], False, 2)]
