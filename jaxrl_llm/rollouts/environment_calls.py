"""What rollouts ask environments: by way of a program's log, so that failures are recorded, counted and said."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any

from jaxrl_llm.environments.protocol import Environment, MakeEnvironment, Observation
from jaxrl_llm.rollouts.agent_metrics import FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.conversations import Conversation
from jaxrl_llm.rollouts.tools import FAILED, Task, Tools
from jaxrl_llm.threads import in_thread

logger = logging.getLogger("jaxrl_llm.rollouts")


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered what is no observation."""


async def begun(tools: Tools, task: Task, number: int, make: MakeEnvironment) -> tuple[Environment, Observation]:
    """An environment and its first observation; made anew once if it fails.

    The samples of a group have environments of one seed, so that their rewards can be compared.
    """
    seed = int(tools.random("environment").integers(2**31))
    made: list[Environment] = []

    async def begin() -> Observation:
        made.append(await in_thread(make, task.row))
        return await _of(made[-1].reset, dict(task.row), seed)

    try:
        seen = await observed(tools, begin, name=f"{number}/reset")
    except EnvironmentFailed:
        seen = await observed(tools, begin, name=f"{number}/reset again")
    return made[-1], seen


def failed(one: Conversation, task: Task, number: int, why: str) -> None:
    one.info[FAILED_ENVIRONMENT] = 1.0
    logger.warning("the environment of sample %d of prompt %d failed %s", number, task.prompt_id, why)


async def _of(method: Any, *arguments: Any) -> Any:
    """What a method returns; plain ones run in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    found = await in_thread(method, *arguments)
    return await found if inspect.isawaitable(found) else found


async def answer(tools: Tools, method: Any, *arguments: Any, name: str) -> Any:
    """What a method of the environment returns, by way of the log. EnvironmentFailed if it raises or hangs."""

    async def call() -> Any:
        return await _of(method, *arguments)

    found = await tools.call(call, name=name, again=True, failing=True)
    if isinstance(found, dict) and set(found) == {FAILED}:
        raise EnvironmentFailed(found[FAILED])
    return found


async def observed(tools: Tools, method: Any, *arguments: Any, name: str) -> Observation:
    """An observation from a method of the environment, as `answer`."""

    async def observation() -> Any:
        found = await _of(method, *arguments)
        return replace(
            found, reward=float(found.reward), done=bool(found.done), truncated=bool(found.truncated),
            player=int(found.player), info={name: float(value) for name, value in found.info.items()},
        ).as_json()  # fmt: skip

    return Observation(**await answer(tools, observation, name=name))


def closing(world: Environment) -> Any:
    close = getattr(world, "close", None)
    return close if close is not None else (lambda: None)
