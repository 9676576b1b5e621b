"""Groups of single replies to a slice of a dialogue, which the policy had with an environment before."""

from __future__ import annotations

from asyncio import gather
from dataclasses import replace

import numpy as np

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.agents.conversation import Conversation
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed, copied, failed, observed
from jaxrl_llm.rollouts.agents.program import AgentSettings, Path, closed, converse, draw_reply, graded, note
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError


@part
def sliced() -> Rollout:
    """Episodes of the run's agents of one reply each, to a dialogue that is cut off before a random turn.

    The policy first has a whole dialogue with the environment, which is not trained on. A turn of it is drawn, all
    equally likely, and the dialogue before it, with its replies and observations, is the prompt of the whole group.
    Each sample is one reply, which a copy of the environment as it was then hears. Its reward is that of this turn and
    the final one that the environment gives thereafter.

    It goes around the run's agents, and leaves other rollouts as they are. Raises InputError for agents that compact
    their context.
    """

    def around(inner: Rollout) -> Rollout:
        settings = inner.agent
        if settings is None:
            return inner
        if settings.limits.compact is not None:
            raise InputError("dialogues that are cut into slices are not compacted: leave out compact")

        async def program(tools: Tools, task: Task) -> list[Episode]:
            (whole,) = await converse(tools, task, task.samples, settings)
            if whole.world is None or not whole.before:  # the environment cannot begin, which each sample then says
                return await inner_rows(tools, task)
            turn = int(tools.random("slice").integers(len(whole.before)))
            replies = (_reply(tools, task, number, whole, turn, settings) for number in range(task.samples))
            rows = await graded(tools, await gather(*replies), settings.turn_rewards)
            return [row for of_one in rows for row in of_one]

        async def inner_rows(tools: Tools, task: Task) -> list[Episode]:
            return list(await inner.program(tools, task))

        return replace(inner, program=program, name=f"{inner.name}, sliced", around=around, most=None)

    return replace(group(), around=around)


def context_before(rows: list[Episode], turn: int) -> tuple[int, ...]:
    """The tokens that the policy saw before a turn of an episode of one or several rows."""
    first = 0
    for row in rows:
        count = int(row.turns.max(initial=-1)) + 1
        if turn < first + count:
            own = row.own.token[: int(np.argmax(row.turns == turn - first))]
            return (*row.prompt, *own.tolist())
        first += count
    raise InputError(f"the episode has {first} turns, but turn {turn} is asked for")


async def _reply(
    tools: Tools, task: Task, number: int, whole: Conversation, turn: int, settings: AgentSettings
) -> Conversation:
    """One reply in the place of that of a turn; not scored where its environment cannot be copied."""
    begun = Episode(context_before(whole.rows, turn), task.prompt_id, number)
    messages, said = list(whole.messages[: whole.before[turn]]), whole.said_until(turn)
    one = Conversation([begun], task.samples, messages, list(whole.asked), said=said)
    path = Path(number, [one], turn=turn)
    assert whole.world is not None
    try:
        path.world = one.world = await copied(tools, whole.world, name=f"{number}/slice", turns=turn)
    except EnvironmentFailed as error:
        failed(one, task, number, "to be copied, so that its reply is not scored", error)
        one.scored = False
        return one
    path.chat = settings.chat(tools.tokenizer, task.row, path.world.tools)
    path.seen = path.world.seen[turn]
    await draw_reply(tools, task, path, settings)
    assert path.reply is not None
    try:
        path.seen = await observed(tools, path.world.step, path.reply, name=f"{number}/{turn}")
        note(one, path.seen)
    except (EnvironmentFailed, InputError) as error:
        failed(one, task, number, "in step, where its episode ends", error)
    path.seen = replace(path.seen, truncated=False)
    await closed(tools, task, path)
    return one
