"""What a copy of an environment answers to the actions that a reply plans."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed, answer, copied, observed
from jaxrl_llm.rollouts.agents.path import Path
from jaxrl_llm.rollouts.agents.plans import items_in

logger = logging.getLogger("jaxrl_llm.rollouts")


def states_text(seen: Sequence[Observation]) -> str:
    """What a simulation saw, as a text: the messages after each action, and whether it was over then."""
    lines = list[str]()
    for number, one in enumerate(seen, start=1):
        said = "\n".join(str(message.get("content", "")) for message in one.messages)
        over = " The episode is over." if one.done or one.truncated else ""
        lines.append(f"After action {number}: {said}{over}")
    return "\n".join(lines)


def planned_actions(text: str, most: int) -> list[str]:
    """The actions that a reply plans after its own: the lines between <plan> and </plan>, at most so many.

    >>> planned_actions("Go left. <plan>open the door\\n\\n2. go in</plan>", 4)
    ['open the door', 'go in']
    """
    found = re.search(r"<plan>(.*?)</plan>", text, re.DOTALL)
    return items_in(found[1] if found else "")[: max(most, 0)]


async def simulated(path: Path, text: str, depth: int, name: str) -> list[Observation]:
    """What a copy of the episode's environment answers to a reply, and to what it plans, `depth` actions in all.

    EnvironmentFailed if there is no copy. One that fails later, or is over, ends the simulation.
    """
    tools = path.tools
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
