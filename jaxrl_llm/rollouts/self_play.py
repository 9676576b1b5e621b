"""Games of several players, in which the policy is each of them."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.data.turns import ChatTurns
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.expressions import part
from jaxrl_llm.rollouts.agent_metrics import FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.agents import AgentSettings, ends_of, note, of_agents
from jaxrl_llm.rollouts.compaction import Compact
from jaxrl_llm.rollouts.conversations import Conversation, Limits, finished, messages_of, state_of
from jaxrl_llm.rollouts.environment_calls import EnvironmentFailed, failed, final_rewards, observed, world_of
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.outside import AHEAD
from jaxrl_llm.rollouts.programs import Rollout
from jaxrl_llm.rollouts.tools import Task, Tools


@part
def self_play(
    environment: MakeEnvironment,
    players: int = 2,
    turns: int = 8,
    turn_tokens: int | None = None,
    episode_tokens: int | None = None,
    turn_rewards: bool = False,
    greedy: bool = False,
    system: str | None = None,
    options: Mapping[str, Any] | None = None,
    context_tokens: int | None = None,
    compact: Compact | None = None,
    ahead: int | None = AHEAD,
) -> Rollout:
    """Groups of games, in which the policy is each of the players.

    environment: makes environments whose observations name the player who is to reply, `Observation.player`, and whose
    `close` returns a reward for each. A task's samples are its games. Each player sees what it is told alone, in a
    conversation of its own with its own reward: the limits, as those of `agent`, are those of a player. Roles differ,
    and so may what they can win: the conversations of a player are compared with those of the same player in the
    group's other games, info["part"]. A player who never replied has a row that is not scored, and a game that is cut
    off is so for all.

    Otherwise as `agent`. Raises InputError unless players is a whole number, at least 2.
    """
    if isinstance(players, bool) or not isinstance(players, int) or players < 2:
        raise InputError(f"players is {shown(players)}, but must be a whole number, at least 2: one player is an agent")
    limits = Limits(turns, turn_tokens, episode_tokens, context_tokens, compact)
    settings = AgentSettings(environment, limits, turn_rewards, greedy, system, options)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        games = await gather(*(_played(tools, task, number, settings, players) for number in range(task.samples)))
        found = [game[player] for player in range(players) for game in games]
        ends = await ends_of(tools, found, turn_rewards)
        rows = [finished(one, end, turn_rewards) for one, end in zip(found, ends, strict=True)]
        return [row.in_part(n // task.samples) for n, of_one in enumerate(rows) for row in of_one]

    return replace(of_agents(program, settings, ahead, players), name="self_play")


async def _played(tools: Tools, task: Task, number: int, settings: AgentSettings, players: int) -> list[Conversation]:
    """One game of the task's group: the conversation of each player."""
    limits = settings.limits
    seats = [
        Conversation([Episode(task.prompt, task.prompt_id, number + player * task.samples)], players * task.samples)
        for player in range(players)
    ]
    try:
        asked = messages_of(task.row, settings.system)
        world, seen = await world_of(tools, task, number, settings.environment)
        chat = ChatTurns(tools.tokenizer, tuple(world.tools), dict(settings.options or {}))
        one = seats[_player(seen, players)]
        one.begin(tools, chat, [*asked, *seen.messages], task, limits)
    except (EnvironmentFailed, InputError) as error:
        failed(seats[0], task, number, "in reset, so that its episode is not scored", error)
        return [_unscored(one) for one in seats]
    one.info = dict(seen.info)
    for move in range(players * limits.turns):
        one.states.append(state_of(seen))
        reply = await one.reply(tools, chat, task, limits, settings.greedy)
        over = True
        try:
            seen = await observed(tools, world.step, reply, name=f"{number}/{move}")
            note(one, seen)
            over = seen.done or seen.truncated or one.rows[-1].truncated
            if not over:
                one = seats[_player(seen, players)]
                if not one.asked:
                    one.begin(tools, chat, [*asked, *seen.messages], task, limits)
                elif one.replies == limits.turns or not await one.go_on(
                    tools, chat, seen.messages, task, limits, settings.greedy
                ):
                    over, seen = True, replace(seen, truncated=True)
        except (EnvironmentFailed, InputError) as error:
            failed(one, task, number, "in step, where its episode ends", error)
            over, seen = True, Observation(truncated=True)
        if over:
            break
    cut = seen.truncated or any(one.rows[-1].truncated for one in seats)
    for one in seats:
        one.rewards += [0.0] * (len(one.states) - len(one.rewards))
        one.rows[-1] = replace(one.rows[-1], truncated=cut)
        one.scored = one.replies > 0
    try:
        finals = await final_rewards(tools, world, players, name=f"{number}/close")
        for one, final in zip(seats, finals, strict=True):
            one.final = final
    except EnvironmentFailed as error:
        if not any(FAILED_ENVIRONMENT in one.info for one in seats):
            failed(seats[0], task, number, "in close, so that its episode is not scored", error)
            return [_unscored(one) for one in seats]
    return seats


def _player(seen: Observation, players: int) -> int:
    if not 0 <= seen.player < players:
        raise EnvironmentFailed(f"it is the turn of player {shown(seen.player)}, but {players} play, numbered from 0")
    return seen.player


def _unscored(one: Conversation) -> Conversation:
    one.scored = False
    return one
