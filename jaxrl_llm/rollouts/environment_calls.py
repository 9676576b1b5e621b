"""What rollouts ask environments: by way of a program's log, so that failures are recorded, counted and said."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from jaxrl_llm.environments.copies import Replayable
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.rollouts.agent_metrics import FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.conversations import Conversation
from jaxrl_llm.rollouts.tools import FAILED, Task, Tools
from jaxrl_llm.threads import called, in_thread

logger = logging.getLogger("jaxrl_llm.rollouts")


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered what is no observation."""


async def world_of(tools: Tools, task: Task, number: int, make: MakeEnvironment) -> tuple[Replayable, Observation]:
    """An environment and its first observation; made anew once if it fails.

    The samples of a group have environments of one seed, so that their rewards can be compared.
    """
    seed = int(tools.random("environment").integers(2**31))
    made: list[Replayable] = []

    async def begin() -> Observation:
        made.append(await in_thread(Replayable, make, task.row))
        return await called(made[-1].reset, dict(task.row), seed)

    try:
        seen = await observed(tools, begin, name=f"{number}/reset")
    except EnvironmentFailed:
        seen = await observed(tools, begin, name=f"{number}/reset again")
    return made[-1], seen


async def copied(tools: Tools, world: Replayable, name: str, turns: int | None = None) -> Replayable:
    """A copy of an environment within an episode, which a fork goes on with; see `Replayable.copy`.

    name: of the call, unique in the group. The caller closes the copy too. EnvironmentFailed if there can be none.
    """
    made: list[Replayable] = []

    async def copy() -> int:
        made.append(await world.copy(turns))
        return len(made[0].seen) - 1

    await answer(tools, copy, name=name)
    return made[0]


def failed(one: Conversation, task: Task, number: int, why: str) -> None:
    """Count and say that the environment of an episode failed."""
    one.info[FAILED_ENVIRONMENT] = 1.0
    logger.warning("the environment of sample %d of prompt %d failed %s", number, task.prompt_id, why)


async def answer(tools: Tools, method: Any, *arguments: Any, name: str) -> Any:
    """What a method of the environment returns, by way of the log. EnvironmentFailed if it raises or hangs."""

    async def call() -> Any:
        return await called(method, *arguments)

    found = await tools.call(call, name=name, again=True, failing=True)
    if isinstance(found, dict) and set(found) == {FAILED}:
        raise EnvironmentFailed(found[FAILED])
    return found


async def observed(tools: Tools, method: Any, *arguments: Any, name: str) -> Observation:
    """An observation from a method of the environment, as `answer`."""

    async def observation() -> Any:
        found = await called(method, *arguments)
        return replace(
            found, reward=float(found.reward), done=bool(found.done), truncated=bool(found.truncated),
            player=int(found.player), info={name: float(value) for name, value in found.info.items()},
        ).as_json()  # fmt: skip

    return Observation(**await answer(tools, observation, name=name))
