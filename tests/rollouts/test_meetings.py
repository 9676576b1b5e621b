"""Meetings of the programs of a step: what they tell each other, on one host and on several, and what goes wrong."""

from __future__ import annotations

import asyncio
from asyncio import gather
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from fake_engine import FakeEngine, Ran, Words, begin, length_of
from simulated_hosts import on_hosts
from test_exchange import batch_of, scored

from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.admission import Rule, admit_first
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.multihost_gather import admit_on, in_lockstep, meet_on, of_all_hosts
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog, Pool


async def _longest(tools: Tools, task: Task) -> list[Any]:
    """Two samples; then one more for the prompts whose samples are longer than the mean of the step, twice."""
    found = list(await gather(*(tools.sample(task.prompt, number=i) for i in range(2))))
    for turn in range(2):
        own = max(one.size for one in found)
        met = await tools.meet(own, name=f"turn {turn}")
        assert met.values[met.place] == own
        if own > sum(met.values) / len(met.values):
            found.append(await tools.sample(task.prompt, number=2 + turn))
    return found


LONGEST = Rollout(_longest, "longest", demands=Demands(variable_size=True, meets=True))


def sizes(found: Any) -> list[list[int]]:
    return [[episode.size for episode in one.episodes] for one in found.groups]


def expected(prompts: range) -> list[list[int]]:
    """By hand, from the lengths of the fake engine's completions."""
    size = {(i, k): min(length_of(i, k), 64) for i in prompts for k in range(4)}
    found = {i: [size[i, 0], size[i, 1]] for i in prompts}
    for turn in range(2):
        own = {i: max(found[i]) for i in prompts}
        for i in prompts:
            if own[i] > sum(own.values()) / len(own):
                found[i].append(size[i, 2 + turn])
    return [found[i] for i in prompts]


@pytest.mark.parametrize("slots", [1, 3, 1000])
def test_a_program_learns_what_the_others_found(slots: int) -> None:
    """Whatever the number of rows that decode at a time, and so the order in which programs come to the meeting."""
    found = sizes(Ran(begin(range(5), 2), Rule(), LONGEST, slots=slots).found)
    assert found == expected(range(5))
    assert {len(one) for one in found} == {2, 4}, "the test needs both"


def test_a_group_resumes_from_its_log_without_the_others() -> None:
    """What was said at a meeting is in the log."""
    flight = begin(range(5), 2)
    whole = Ran(flight, Rule(), LONGEST)
    place = max(range(5), key=lambda i: len(whole.found.groups[i].episodes))
    logs: list[GroupLog] = []

    async def recorded(tools: Tools, task: Task) -> list[Any]:
        found = await _longest(tools, task)
        logs.append(tools._host.log())  # type: ignore[attr-defined]
        return found

    Ran(flight, Rule(), Rollout(recorded, "recorded", demands=Demands(variable_size=True, meets=True)))
    (log,) = (one for one in logs if one.prompt_id == place)
    again = Ran((log,), Rule(), LONGEST)
    assert sizes(again.found) == [sizes(whole.found)[place]]
    assert not again.requests


@pytest.mark.parametrize(("count", "together"), [(2, 1), (3, 1), (4, 2), (2, 2)])
@pytest.mark.parametrize("groups", [2, 5])
def test_all_hosts_meet(count: int, together: int, groups: int) -> None:
    """Also a host without groups (two groups on three), and the hosts of a unit that follow its first."""
    flight = begin(range(groups), 2)

    def a_round(flight: Pool, hosts: Hosts = ALONE) -> Any:
        places = hosts.share(range(len(flight)))
        within = partial(in_lockstep, hosts)
        admit = admit_first if hosts.count == 1 else admit_on(hosts, places)
        own = tuple(flight[place] for place in places)
        found = Ran(own, Rule(), LONGEST, within=within, admit=admit, meet=meet_on(hosts, places)).found
        return of_all_hosts(hosts, places, found, scored(found), batch_of)[0]

    for found in on_hosts(count, partial(a_round, flight), together):
        assert sizes(found) == expected(range(groups))


def test_a_program_that_fails_is_not_waited_for() -> None:
    async def program(tools: Tools, task: Task) -> list[Any]:
        if task.prompt_id == 1:
            raise ValueError("no")
        met = await tools.meet(task.prompt_id, name="all")
        assert (met.values, met.place) == ([0, 2], task.prompt_id // 2)
        return [await tools.sample(task.prompt, number=0)]

    found = Ran(begin(range(3), 1), Rule(), Rollout(program, demands=Demands(meets=True))).found
    assert [one.failed for one in found.groups] == [False, True, False]


def test_programs_may_wait_for_others_longer_than_for_a_call() -> None:
    """The rewards of one prompt take longer than the time limit of what a program waits for otherwise."""

    async def slow(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        await asyncio.sleep(0.2)
        return [episode.scored(1.0) for episode in episodes]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        one = await tools.sample(task.prompt, number=0)
        found = await tools.score([one]) if task.prompt_id else [one]
        await tools.meet(0, name="all")
        return found

    flight = [(log, Task({}, log.prompt, log.prompt_id, 1, 9)) for log in begin(range(2), 1)]

    def make(requests: Any, temperature: Any, stats: Any) -> Any:
        return FakeEngine(9)

    driver = Driver(Rollout(program, demands=Demands(meets=True)), make, slow, Words(), time_limit=0.02)
    assert [one.failed for one in driver.run(flight, Rule()).groups] == [False, False]


def test_what_follows_is_computed_once() -> None:
    seen: list[list[int]] = []

    def decide(values: list[int]) -> dict[str, int]:
        seen.append(values)
        return {"total": sum(values)}

    async def program(tools: Tools, task: Task) -> list[Any]:
        met = await tools.meet(task.prompt_id, name="all", decide=decide)
        assert met.decision == {"total": 6}
        return [await tools.sample(task.prompt, number=0)]

    found = Ran(begin(range(4), 1), Rule(), Rollout(program, demands=Demands(meets=True))).found
    assert not any(one.failed for one in found.groups)
    assert seen == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("case", "message"), [
    ("undeclared", "declare it, Rollout(..., demands=Demands(meets=True))"), ("twice", "calls 'all' twice"),
    ("names", "meetings of different names: 0, 1"), ("value", "which JSON cannot represent"),
    ("at once", "waits for 'all' already"), ("decision", "division by zero"),
])  # fmt: skip
def test_what_goes_wrong_is_said(case: str, message: str) -> None:
    said: list[str] = []

    async def meet(tools: Tools, task: Task) -> None:
        if case == "twice":
            await tools.meet(0, name="all")
        if case == "at once":
            await gather(tools.meet(0, name="all"), tools.meet(0, name="other"))
        if case == "decision":
            await tools.meet(0, name="all", decide=lambda values: 1 / values[0])
        value = object() if case == "value" else 0
        await tools.meet(value, name=str(task.prompt_id) if case == "names" else "all")

    async def program(tools: Tools, task: Task) -> list[Any]:
        try:
            await meet(tools, task)
        except Exception as error:
            said.append(str(error))
            raise
        return []

    found = Ran(begin(range(2), 1), Rule(), Rollout(program, demands=Demands(meets=case != "undeclared"))).found
    assert all(one.failed for one in found.groups)
    assert len(said) == 2
    assert all(message in one for one in said)
