"""Agents that write each reply again once they have seen what their plan leads to, in a copy of the environment."""

from __future__ import annotations

import logging
import re

from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed, answer, copied, observed
from jaxrl_llm.rollouts.agents.plans import items_in
from jaxrl_llm.rollouts.agents.program import Path
from jaxrl_llm.rollouts.context import Tools

logger = logging.getLogger("jaxrl_llm.rollouts")


def planned_actions(text: str, most: int) -> list[str]:
    """The actions that a reply plans after its own: the lines between <plan> and </plan>, at most so many.

    >>> planned_actions("Go left. <plan>open the door\\n\\n2. go in</plan>", 4)
    ['open the door', 'go in']
    """
    found = re.search(r"<plan>(.*?)</plan>", text, re.DOTALL)
    return items_in(found[1] if found else "")[: max(most, 0)]


async def simulated(tools: Tools, path: Path, text: str, depth: int, name: str) -> list[Observation]:
    """What a copy of the episode's environment answers to a reply, and to what it plans, `depth` actions in all.

    EnvironmentFailed if there is no copy. One that fails later, or is over, ends the simulation.
    """
    assert path.world is not None
    assert path.chat is not None
    world = await copied(tools, path.world, name=f"{name}/copy")
    seen = list[Observation]()
    try:
        for number, action in enumerate([text, *planned_actions(text, depth - 1)]):
            seen.append(await observed(tools, world.step, path.chat.reading.text(action), name=f"{name}/{number}"))
            if seen[-1].done or seen[-1].truncated:
                break
    except EnvironmentFailed as error:
        logger.warning("a simulation ends after %d actions: %s", len(seen), error)
    try:
        await answer(tools, world.close, name=f"{name}/close")
    except EnvironmentFailed as error:
        logger.warning("the copy of a simulation does not close: %s", error)
    return seen
