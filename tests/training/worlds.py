"""Rollouts for tests of runs, given as path/to/worlds.py:NAME."""

from __future__ import annotations

import os
import time
from asyncio import gather
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.recorded import RecordedSteps
from jaxrl_llm.rollouts.agents.compaction import Summary
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import conversation


class Adding:
    """An environment with a state that nothing else holds: it counts all letters that it was told."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.total = len(row["prompt"])

    def step(self, text: str) -> tuple[str, bool]:
        time.sleep(float(os.environ.get("WORLD_SECONDS", 0)))
        self.total += len(text)
        return f" [{self.total}] ", False


@contextmanager
def _working() -> Iterator[None]:
    """Says by a file that an environment is working."""
    path = os.environ.get("WORLD_WORKING")
    if path:
        Path(path).touch()
    yield
    if path:
        Path(path).unlink(missing_ok=True)


class Echo:
    """As Gymnasium has them: three turns; letters in the first half of the alphabet are rewarded."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.number, self.turns = (seed or 0) % 10, 0
        return f"{self.number}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with _working():
            time.sleep(float(os.environ.get("WORLD_SECONDS", 0)))
        self.turns, self.number = self.turns + 1, (self.number + len(action)) % 10
        return f"{self.number}?", float(action[:1] < "n"), self.turns == 3, False, {}


class Unlike(Echo):
    """Of all environments there were, none has said the same."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset()
        return f"{self._unheard()}?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return (f"{self._unheard()}?", *rest)

    def _unheard(self) -> int:
        return int.from_bytes(os.urandom(4))


class Flaky(Echo):
    """It cannot be reset where the row says so, and fails in the second turn elsewhere."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        if self.row["answer"] == "1":
            raise OSError("no server")
        return super().reset(seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.turns == 1:
            raise OSError("the server is gone")
        return super().step(action)


class Purse:
    """As TRL has them: a tool, and the reward at the end."""

    def reset(self, **row: Any) -> str:
        self.coins = len(row["answer"])
        return f"{self.coins} coins"

    def add(self, text: str) -> str:
        """Put coins in.

        Args:
            text: one coin for each letter.
        """
        self.coins += len(text)
        return f"{self.coins} coins"

    def get_reward(self) -> float:
        """Whether their number is even."""
        return float(self.coins % 2 == 0)


class Tried(Purse):
    """Of the first four episodes of a prompt those that put coins in have the reward 1, and no later one; "1": all 0.5.

    MADE counts the episodes of each prompt. What an episode gets depends on its own replies, not on when it began.
    """

    MADE: ClassVar[dict[str, Iterator[int]]] = {}

    def reset(self, **row: Any) -> str:
        self.early = next(self.MADE.setdefault(row["prompt"], count())) < 4
        self.half, self.put = row["answer"] == "1", False
        return super().reset(**row)

    def add(self, text: str) -> str:
        """Put coins in.

        Args:
            text: one coin for each letter.
        """
        self.put = True
        return super().add(text)

    def get_reward(self) -> float:
        """Whether it put coins in, among the first."""
        return 0.5 if self.half else float(self.early and self.put)


BOTH = {"echo": Echo, "purse": Purse}


class NoReset:
    """No environment."""

    def step(self, action: str) -> None:
        """Do nothing."""


class NoReward:
    """Its episodes need another reward."""

    def reset(self, **row: Any) -> None:
        """Begin."""


class Undescribed(Purse):
    """A tool without a docstring."""

    def take(self, text):  # type: ignore[no-untyped-def]
        return text


class Unmade:
    """It cannot be made."""

    def __init__(self) -> None:
        raise OSError("no server")

    def reset(self, **row: Any) -> None:
        """Never called."""


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: which.
    """
    return 2 * number


def add(text: str) -> str:
    """Count coins.

    Args:
        text: one coin for each letter.
    """
    return f"{len(text)} coins"


NUMBER = 3
SHORT = Summary(3, ask="sum?", told="")


class Duel:
    """As TextArena has them, for two: the longer of two replies wins, after three rounds."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.number, self.players, self.letters = (seed or 0) % 10, num_players, [0] * num_players
        self.turns = 0

    def get_observation(self) -> tuple[int, list[tuple[int, str, int]]]:
        return self.turns % self.players, [(-1, f"{self.number + self.turns}?", 0)]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        with _working():
            time.sleep(float(os.environ.get("WORLD_SECONDS", 0)))
        self.letters[self.turns % self.players] += len(action)
        self.turns += 1
        return self.turns == 3 * self.players, {}

    def close(self) -> dict[int, float]:
        return {player: float(own == max(self.letters)) for player, own in enumerate(self.letters)}


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


class Walk:
    """Two states, left and right, which a reply with an even number of letters changes; even replies are rewarded."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.right, self.steps = False, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": "go"}], state="left")

    def step(self, reply: Reply) -> Observation:
        even = len(str(reply.message.get("content"))) % 2 == 0
        self.right, self.steps = self.right != even, self.steps + 1
        state = "right" if self.right else "left"
        return Observation([{"role": "user", "content": state}], float(even), self.steps == 3, state=state)


def walks() -> Rollout:
    """Episodes of three turns, with their rewards."""
    return agent(Walk, turns=3, turn_rewards=True)


def plans() -> Rollout:
    """The same, as if the first letter of a reply decided to switch where it is even, the second were the subgoal."""
    walk = walks()

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return [row.with_info(plan=parts_of(row)) for row in await walk.program(tools, task)]

    return replace(walk, program=program, provides=walk.provides | {"plan"})


def parts_of(row: Episode) -> list[float]:
    """Of the tokens after the prompt, as `rollouts.agents.plans` numbers them."""
    found: list[float] = []
    for at, (token, turn) in enumerate(zip(row.own.token, row.turns, strict=True)):
        place = at - int(np.argmax(row.turns == turn))
        found.append(0.0 if turn < 0 else (1.0 + (token % 2 == 0), 4.0, 5.0)[min(place, 2)])
    return found


def recorded() -> Rollout:
    """Episodes on a recorded trajectory of three steps, where a reply with an even number of letters matches."""
    steps = [{"observation": "s", "action": {"action": "a"}}] * 3

    def judge(reply: str, expert: Mapping[str, Any]) -> tuple[float, float]:
        return 1.0, float(len(reply) % 2 == 0)

    made = agent(lambda row: RecordedSteps({**row, "s": steps}, "s", -1, judge), 3, turn_rewards=True, fresh=True)
    return replace(made, name="semi_online(s)")  # as ui_s1's own


def rounds() -> Rollout:
    """Episodes of three turns, each of which is a row of its own."""
    return agent(Walk, turns=3, fresh=True)
