"""Rollouts for tests of runs, given as path/to/worlds.py:NAME."""

from __future__ import annotations

import os
import time
from asyncio import gather
from typing import Any

from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import Rollout, conversation
from jaxrl_llm.rollouts.tools import Task, Tools


class Adding:
    """An environment with a state that nothing else holds: it counts all letters that it was told."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.total = len(row["prompt"])

    def step(self, text: str) -> tuple[str, bool]:
        time.sleep(float(os.environ.get("WORLD_SECONDS", 0)))
        self.total += len(text)
        return f" [{self.total}] ", False


def talk() -> Rollout:
    """Two turns."""
    return conversation(Adding, turns=2)


async def everything(tools: Tools, task: Task) -> list[Episode]:
    """Each pair of samples is a trunk of three tokens that forks; each branch then has a second turn."""

    async def branch(trunk: Episode, number: int) -> Episode:
        world = Adding(dict(task.row))
        episode = await tools.sample(trunk, number=number, limit=3)
        observation, _ = await tools.call(world.step, tools.decode(episode.last), name=str(number), again=True)
        return await tools.sample(episode + tools.given(observation), limit=6)

    async def pair(number: int) -> list[Episode]:
        trunk = await tools.sample(task.prompt, number=number, limit=6, pause_at=3)
        return list(await gather(branch(trunk, number), branch(trunk, number + 1)))

    return [leaf for pairs in await gather(*(pair(i) for i in range(0, task.samples, 2))) for leaf in pairs]
