"""Environments of unfinished programs, which go on with them in the next step; a killed run makes them anew."""

from __future__ import annotations

import itertools
import threading
from asyncio import gather
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import Ran, begin, length_of

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import NotDeterministicError
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.replay_log import from_arrays, to_arrays

LONG, OTHER = [prompt for prompt in range(4000) if length_of(prompt, 0) > 40][:2]
MEDIUM = next(prompt for prompt in range(4000) if 24 < length_of(prompt, 0) < 30)
SEGMENT = Rule(None, 8, train_unfinished=True)


class World:
    """Answers with numbers that no other world gives, so that a second one cannot stand in for it."""

    made = itertools.count()

    def __init__(self) -> None:
        self.name, self.steps = next(self.made), 0

    def step(self) -> list[int]:
        self.steps += 1
        return [self.name, self.steps]


def played(worlds: list[World], steps: Callable[[World], Any] = World.step) -> Rollout:
    """Two samples, each of which steps its world, draws, and steps it again."""

    async def one(tools: Tools, task: Task, number: int) -> Episode:
        world = tools.held(str(number))
        if world is None:
            world = tools.hold(str(number), World())
            worlds.append(world)
        seen = [await tools.call(steps, world, name=f"{number}/0", again=tools.reruns(world))]
        episode = await tools.sample(task.prompt, number=number, limit=20)
        seen.append(await tools.call(steps, world, name=f"{number}/1", again=tools.reruns(world)))
        episode = await tools.sample(episode, number=number, limit=20)
        assert seen == [[world.name, 1], [world.name, 2]], "the program sees one world, once"
        return episode

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return list(await gather(*(one(tools, task, number) for number in range(task.samples))))

    return Rollout(program, "worlds apart")


def test_an_unfinished_program_goes_on_with_what_it_holds() -> None:
    worlds = list[World]()
    rollout = played(worlds)
    ran = Ran(begin([LONG], 2), SEGMENT, rollout)
    for _ in range(20):
        if not ran.pool:
            break
        assert list(ran.found.held) == [log.key for log in ran.pool]
        ran = Ran(ran.pool, SEGMENT, rollout, held=ran.found.held)
        assert not ran.found.groups[0].failed
    assert not ran.pool
    assert not ran.found.held, "a program that is over holds nothing"
    assert [world.steps for world in worlds] == [2, 2], "no step is taken again"


def test_what_a_killed_run_asks_again_and_is_answered_otherwise_costs_the_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rollout = played([])
    ran = Ran(begin([LONG, OTHER], 2), SEGMENT, rollout)
    killed, held = from_arrays(to_arrays(ran.pool)), dict(ran.found.held)
    del held[killed[0].key]
    again = Ran(killed, SEGMENT, rollout, held=held)
    assert [one.failed for one in again.found.groups] == [True, False]
    assert f"failed on prompt {LONG}, whose group counts as failed" in caplog.text
    assert "'0/0' returns another answer than before" in caplog.text
    assert [log.prompt_id for log in again.pool] == [OTHER]
    with pytest.raises(NotDeterministicError, match=r"worlds apart is not deterministic: .* another answer"):
        Ran(killed, SEGMENT, rollout, strict=True)


def test_what_is_held_serves_once(caplog: pytest.LogCaptureFixture) -> None:
    """A world that has gone on is not that of a step that is done again, as after a spike."""
    worlds = list[World]()
    ran = Ran(begin([LONG], 2), SEGMENT, played(worlds))
    for _ in range(2):
        again = Ran(ran.pool, SEGMENT, played(worlds), held=ran.found.held)
    assert again.found.groups[0].failed
    assert len(worlds) == 4


def test_what_is_held_with_other_answers_is_left() -> None:
    worlds = list[World]()
    ran = Ran(begin([LONG], 2), SEGMENT, played(worlds))
    (log,) = ran.pool
    other = log._replace(recorded={})
    again = Ran((other,), SEGMENT, played(worlds), held=ran.found.held)
    assert len(worlds) == 4
    assert not again.found.groups[0].failed


def test_a_step_ends_when_what_is_held_has_answered() -> None:
    """Else the world would know a step that the log does not."""
    worlds, go_on = list[World](), threading.Event()

    def slow(world: World) -> Any:
        if world is worlds[0] and world.steps:
            assert go_on.wait(30)
        return world.step()

    threading.Timer(0.5, go_on.set).start()  # by then the other one is complete
    rollout = replace(played(worlds, slow), demands=replace(played(worlds, slow).demands, max_wait_steps=None))
    ran = Ran(begin([LONG, MEDIUM], 1), Rule(1), rollout)
    assert ran.complete == [MEDIUM]
    (log,) = ran.pool
    assert log.recorded == {"0/0": [worlds[0].name, 1], "0/1": [worlds[0].name, 2]}
    ran = Ran(ran.pool, Rule(1), rollout, held=ran.found.held)
    assert not ran.found.groups[0].failed
    assert [world.steps for world in worlds] == [2, 2]
