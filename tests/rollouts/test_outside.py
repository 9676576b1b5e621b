"""Decoding goes on while environments answer, and how long they take changes nothing."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from asyncio import gather
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_engine import LIMIT, FakeEngine, Words, begin, length_of, score

from jaxrl_llm.core.rollout import AHEAD, Demands, Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import Draws
from jaxrl_llm.rollouts.runtime.admission import Collected, Rule
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.stats import Stats

TURNS = 3
LONG = [next(n for n in range(900) if length_of(prompt, n) > 30) for prompt in range(2)]  # samples of 30 tokens
Answer = Callable[[int, int, int], Any]  # (prompt, sample, turn) -> the observation, or an awaitable of it


class Watched(FakeEngine):
    """It notes what it is asked for, and at which of its steps."""

    steps = 0

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.asked: list[tuple[int, int, int, int]] = []  # step, prompt, sample, tokens before

    def submit(self, request: Request) -> int:
        self.asked.append((self.steps, request.prompt_id, request.sample, request.begun.size))
        return super().submit(request)

    def step(self, chunk: int) -> list[Completion]:
        self.steps += 1
        return super().step(chunk)


def conversations(answer: Answer, ahead: int | None = AHEAD) -> Rollout:
    async def one(tools: Tools, task: Task, number: int) -> Episode:
        episode = await tools.sample(task.prompt, number=number)
        for turn in range(1, TURNS):
            text = await tools.call(answer, task.prompt_id, number, turn, name=f"{number}/{turn}", again=True)
            episode = await tools.sample(episode + tools.given(text))
        return episode

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return list(await gather(*(one(tools, task, number) for number in range(task.samples))))

    return Rollout(program, demands=Demands(max_wait_steps=ahead))


def rounds(answer: Answer, ahead: int | None = AHEAD) -> Rollout:
    """The same episodes, which take their turns together, as agents that fork do, from tasks within tasks."""

    async def deep(work: Any, depth: int = 3) -> Any:
        return (await gather(deep(work, depth - 1)))[0] if depth else await work

    async def program(tools: Tools, task: Task) -> list[Episode]:
        numbers = range(task.samples)
        episodes = list(await gather(*(deep(tools.sample(task.prompt, number=number)) for number in numbers)))
        for turn in range(1, TURNS):
            calls = [
                tools.call(answer, task.prompt_id, number, turn, name=f"{number}/{turn}", again=True)
                for number in numbers
            ]
            texts = await gather(*map(deep, calls))
            told = [one + tools.given(text) for one, text in zip(episodes, texts, strict=True)]
            episodes = list(await gather(*(deep(tools.sample(one)) for one in told)))
        return episodes

    return Rollout(program, demands=Demands(max_wait_steps=ahead))


def run(rollout: Rollout, slots: int, prompts: int = 4, **settings: Any) -> tuple[Collected, Watched]:
    engines: list[Watched] = []

    def make(requests: Sequence[Request], draws: Draws, stats: Stats) -> Any:
        engines.append(Watched(slots))
        return engines[-1]

    flight = begin(range(prompts), 2)
    tasks = [Task({"prompt": ""}, log.prompt, log.prompt_id, log.samples, LIMIT) for log in flight]
    driver = Driver(rollout, make, score, Words(), **settings)
    found = driver.run(list(zip(flight, tasks, strict=True)), Rule())
    assert not any(one.failed for one in found.groups)
    return found, engines[0]


def late(seed: int, threads: bool) -> Answer:
    """Environments that take up to 6 ms, differently each time."""
    delays = random.Random(seed)

    async def asynchronous(prompt: int, sample: int, turn: int) -> str:
        await asyncio.sleep(delays.random() * 0.006)
        return f"{prompt} {sample} {turn}"

    def in_thread(prompt: int, sample: int, turn: int) -> str:
        time.sleep(delays.random() * 0.006)
        return f"{prompt} {sample} {turn}"

    return in_thread if threads else asynchronous


def at_once(prompt: int, sample: int, turn: int) -> str:
    return f"{prompt} {sample} {turn}"


@pytest.mark.parametrize("program", [conversations, rounds])
def test_episodes_and_the_schedule_do_not_depend_on_delays_and_episodes_not_on_slots(
    program: Callable[..., Rollout],
) -> None:
    expected = None
    for slots in (1, 4, 64):
        schedule = None
        for seed, threads in ((0, False), (1, True), (2, False)):
            found, engine = run(program(late(seed, threads)), slots)
            schedule = schedule or engine.asked
            assert engine.asked == schedule, "what is decoded together is the same to the step"
            episodes = [episode for one in found.groups for episode in one.episodes]
            expected = expected or episodes
            for one, other in zip(episodes, expected, strict=True):
                assert one.tokens == other.tokens
                assert one.own.logp.tobytes() == other.own.logp.tobytes()
                assert one.turns.tolist() == other.turns.tolist()
    as_they_come = run(program(late(3, True), None), 4)[0]
    for one, other in zip([e for g in as_they_come.groups for e in g.episodes], expected or [], strict=True):
        assert one.tokens == other.tokens


@pytest.mark.parametrize(("ahead", "steps"), [(AHEAD, AHEAD), (9, 9), (None, 9)])
def test_others_are_decoded_while_an_environment_answers(ahead: int | None, steps: int) -> None:
    """The first answer comes only when the engine has taken so many more steps: if decoding waited, it never would."""
    engines: list[Watched] = []
    enough = threading.Event()

    class Counted(Watched):
        def step(self, chunk: int) -> list[Completion]:
            found = super().step(chunk)
            if waits and self.steps >= waits[0] + steps:
                enough.set()
                time.sleep(0.002)
            return found

    waits = list[int]()

    def answer(prompt: int, sample: int, turn: int) -> str:
        if not waits:
            waits.append(engines[0].steps)
            assert enough.wait(20)
        return "1"

    def make(requests: Sequence[Request], draws: Draws, stats: Stats) -> Any:
        engines.append(Counted(64))
        return engines[-1]

    flight = begin(range(8), 2)
    tasks = [Task({"prompt": ""}, log.prompt, log.prompt_id, log.samples, LIMIT) for log in flight]
    driver = Driver(conversations(answer, ahead), make, score, Words(), time_limit=30)
    found = driver.run(list(zip(flight, tasks, strict=True)), Rule())
    assert not any(one.failed for one in found.groups)
    assert enough.is_set()


@pytest.mark.parametrize(("prompts", "ahead", "step"), [(2, AHEAD, 5 + AHEAD), (2, 9, 14), (2, 0, 5), (1, 9, 5)])
def test_an_answer_counts_at_its_step_and_at_once_where_nothing_is_left_to_decode(
    prompts: int, ahead: int, step: int
) -> None:
    """The first prompt asks after 5 tokens, a token a step; the second is decoded for 30 steps."""

    async def program(tools: Tools, task: Task) -> list[Episode]:
        if task.prompt_id:
            return [await tools.sample(task.prompt, number=LONG[1], limit=30)] * 2
        first = await tools.sample(task.prompt, number=LONG[0], limit=5)
        told = await tools.call(at_once, 0, 0, 1, name="told")
        return [await tools.sample(first + tools.given(told), limit=5)] * 2

    _, engine = run(Rollout(program, demands=Demands(max_wait_steps=ahead)), 64, prompts)
    assert [one for one in engine.asked if one[1] == 0] == [(0, 0, LONG[0], 0), (step, 0, LONG[0], 8)]
