"""Agents that begin again in the middle of a success of their own group."""

from __future__ import annotations

import logging
from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from jaxrl_llm.core.ranges import Count, Range, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import AHEAD, Rollout
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.environments.protocol import MakeEnvironment
from jaxrl_llm.rollouts.agents.conversation import Conversation, Limits, finished
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed, copied
from jaxrl_llm.rollouts.agents.metrics import RESTARTED
from jaxrl_llm.rollouts.agents.program import AgentSettings, Path, closed, converse, ends_of, of_agents, take_turn
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode

IMITATED = "imitated"
logger = logging.getLogger("jaxrl_llm.rollouts")


@part
def restarting(
    environment: MakeEnvironment,
    share: Annotated[float, Range(least=0, below=1)] = 0.5,
    success: float = 0.0,
    turns: Count = 8,
    turn_tokens: Count | None = None,
    episode_tokens: Count | None = None,
    turn_rewards: bool = False,
    greedy: bool = False,
    system: str | None = None,
    format: PromptFormat | None = None,
    ahead: Count | None = AHEAD,
) -> Rollout:
    """Groups of episodes with an environment, of which a share begins with turns of a success (ROME, 2512.24873).

    Of n samples n - round(share n), at least one, are episodes as `rollouts.agents.agent` has them. The first
    with a score (and rewards of turns) above `success` is the model. The others begin with its first p turns, p from
    its last turn back to 1 and then again from the last, each in a copy of its environment as it was then, and sample
    the rest. Where there is no success, it has a single turn, or the environment cannot be copied, they are episodes of
    their own.

    info["imitated"] marks the tokens that were taken over: k from the end of the success for those of its k-th last
    turn, 0 for all others; info["imitated_score"] is its score, 0 without one. Other arguments: as of `agent`. Provides
    what that does, and imitated and imitated_score.
    """
    check_number("success", success)
    limits = Limits(turns, turn_tokens, episode_tokens)
    settings = AgentSettings(environment, limits, turn_rewards, greedy, system, format or PromptFormat())

    async def program(tools: Tools, task: Task) -> list[Episode]:
        again = min(round(share * task.samples), task.samples - 1)
        numbers = range(task.samples)

        async def fresh(number: int) -> Conversation:
            (one,) = await converse(tools, task, number, settings)
            return one

        first = list(await gather(*map(fresh, numbers[: task.samples - again])))
        ends = await ends_of(tools, first, turn_rewards)
        model, score = _best_first(first, ends, turn_rewards, success)
        places = anchors(0 if model is None else len(model.rewards), again)

        async def restart(number: int, turn: int | None) -> tuple[Conversation, int]:
            if model is None or turn is None:
                return await fresh(number), 0
            try:
                return await _from_turn(tools, task, number, model, turn, settings), turn
            except EnvironmentFailed as error:
                logger.warning("prompt %d: %s; sample %d is an episode of its own", task.prompt_id, error, number)
                return await fresh(number), 0

        found = await gather(*map(restart, numbers[task.samples - again :], places))
        ends += await ends_of(tools, [one for one, _ in found], turn_rewards)
        out = []
        for (one, taken), end in zip([*((one, 0) for one in first), *found], ends, strict=True):
            length = len(model.rewards) if model is not None else 0
            out += [
                row.with_info(
                    imitated=_left(row, taken, length),
                    imitated_score=score if taken else 0.0,
                    **{RESTARTED: float(taken > 0)},
                )
                for row in finished(one, end, turn_rewards)
            ]
        return out

    rollout = of_agents(program, settings, ahead)
    return replace(rollout, name="restarting", provides=rollout.provides | {IMITATED, "imitated_score"})


def anchors(turns: int, count: int) -> list[int | None]:
    """The turns at which `count` episodes leave one of so many turns: the last first; None where it has only one.

    >>> anchors(4, 5), anchors(1, 2)
    ([3, 2, 1, 3, 2], [None, None])
    """
    return [turns - 1 - number % (turns - 1) if turns > 1 else None for number in range(count)]


def _best_first(
    found: Sequence[Conversation], ends: Sequence[Episode], turn_rewards: bool, success: float
) -> tuple[Conversation | None, float]:
    """The first success, and its score with the rewards of its turns."""
    for one, end in zip(found, ends, strict=True):
        score = (end.reward or 0.0) + (sum(one.rewards) if turn_rewards else 0.0)
        if score > success:
            return one, score
    return None, 0.0


async def _from_turn(
    tools: Tools, task: Task, number: int, model: Conversation, turn: int, settings: AgentSettings
) -> Conversation:
    """An episode that begins as the model does up to its turn `turn`. EnvironmentFailed if it cannot be copied."""
    assert model.world is not None
    world = await copied(tools, model.world, name=f"{number}/from {turn}", turns=turn)
    rows: list[Episode] = []
    before = 0
    for row in model.rows:
        count = int(row.turns.max(initial=-1)) + 1
        if before + count > turn:  # the row of that turn
            rows.append(row.first(int(np.argmax(row.turns == turn - before))))
            break
        rows.append(row)
        before += count
    step = task.samples
    one = Conversation(
        [replace(row, sample=number + place * step, info={}) for place, row in enumerate(rows)], step,
        list(model.messages[: model.before[turn]]), list(model.asked), list(model.rewards[:turn]),
        states=list(model.states[:turn]), before=list(model.before[:turn]), replies=turn, world=world,
        said=model.said_until(turn),
    )  # fmt: skip
    chat = settings.chat(tools.tokenizer, task.row, world.tools)
    path = Path(one.rows[0].sample, [one], world, chat, world.seen[turn], turn)
    while not path.over:
        await take_turn(tools, task, path, settings)
    (one,) = await closed(tools, task, path)
    return one


def _left(row: Episode, taken: int, length: int) -> list[float]:
    """For each token after the prompt: turns of the success from its own to the last, if it was taken over, else 0."""
    first: Any = row.info["first_turn"]
    turn = np.where(row.turns >= 0, row.turns + int(first), length)
    return np.where(turn < taken, length - turn, 0).astype(float).tolist()
