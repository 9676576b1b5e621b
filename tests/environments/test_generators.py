"""Environments that draw from global generators: each episode has numbers of its own, which its seed begins."""

# ruff: noqa: NPY002 (environments may use what is old)

from __future__ import annotations

import asyncio
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.adapters import environments
from jaxrl_llm.environments.copies import Generators, Replayable
from jaxrl_llm.rollouts.agents import environment_calls
from jaxrl_llm.rollouts.agents.environment_calls import tell_of_beginnings
from jaxrl_llm.rollouts.agents.program import agent

END = TEMPLATES["plain"][1]


class Dice:
    """Draws in each method, from Python's and NumPy's generators."""

    def __init__(self) -> None:
        self.first = random.random()

    def reset(self) -> tuple[str, dict[str, Any]]:
        return f"{self.first} {np.random.rand()} {random.choice('abcdefghijkl')}", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{random.randint(0, 10**9)} {np.random.randint(10**9)}", 0.0, False, False, {}


class Waiting(Dice):
    """The same, in coroutines."""

    async def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0.001 * random.random())
        return super().step(text)


def said(kind: type, rows: list[dict[str, Any]], samples: int = 2) -> list[list[str]]:
    """What each episode of each row's group was told."""
    tokenizer = tokenizer_of("plain")
    found, _ = run_agents(agent(environments(kind), turns=3), tokenizer, lambda *_: f"ok{END}", rows, samples)
    return [[tokenizer.decode(one.tokens) for one in group.episodes] for group in found.groups]


@pytest.mark.parametrize("kind", [Dice, Waiting])
def test_samples_begin_alike_groups_differ_and_two_runs_are_equal(kind: type) -> None:
    rows = [{"prompt": "Play."}, {"prompt": "Play."}]
    first, again = said(kind, rows), said(kind, rows)
    assert first == again
    for group in first:
        assert len(set(group)) == 1
    assert first[0][0] != first[1][0]


def test_the_process_draws_as_if_nobody_played() -> None:
    random.seed(3)
    np.random.seed(3)
    wanted = random.random(), np.random.rand(), random.random()
    random.seed(3)
    np.random.seed(3)
    found = [random.random()]
    with Generators(5).within():
        random.seed(1)
        np.random.seed(1)
        random.random()
        np.random.rand()
    found += [np.random.rand(), random.random()]
    assert tuple(found) == wanted


def test_within_they_are_pythons_and_numpys_own() -> None:
    with Generators(5).within():
        found = random.random(), random.choice("abc"), random.sample(range(9), 4), np.random.normal(size=3).tolist()
        state = random.getstate(), np.random.get_state()[1].tolist()
    own, arrays = random.Random(5), np.random.RandomState(5)
    assert found == (own.random(), own.choice("abc"), own.sample(range(9), 4), arrays.normal(size=3).tolist())
    assert state == (own.getstate(), arrays.get_state()[1].tolist())


def test_a_thread_of_somebody_else_draws_from_the_process() -> None:
    random.seed(4)
    wanted, found = random.Random(4).random(), list[float]()
    with Generators(5).within():
        thread = threading.Thread(target=lambda: found.append(random.random()))
        thread.start()
        thread.join()
    assert found == [wanted]


def test_a_copy_goes_on_with_the_same_numbers_and_the_first_does_not_notice() -> None:
    async def play() -> tuple[list[str], list[str]]:
        world = Replayable(environments(Dice), {}, 7)
        await world.reset({}, 7)
        other = await world.copy()
        reply = Reply({"role": "assistant", "content": "x"}, (), None)
        heard = [[str((await one.step(reply)).messages) for _ in range(2)] for one in (world, other)]
        return heard[0], heard[1]

    first, second = asyncio.run(play())
    assert first == second
    assert first[0] != first[1]


def test_what_has_numbers_of_its_own_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Unseeded:
        def reset(self) -> tuple[str, dict[str, Any]]:
            return str(np.random.default_rng().random()), {}

        def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 0.0, True, False, {}

    environment_calls._tell_of_beginnings.cache_clear()
    said(Unseeded, [{"prompt": "a"}, {"prompt": "b"}])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the samples of a group begin differently")
    assert "Unseeded" in line
    caplog.clear()
    environment_calls._tell_of_beginnings.cache_clear()
    said(Dice, [{"prompt": "a"}])
    assert not caplog.records
    tell_of_beginnings([])
