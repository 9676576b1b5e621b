"""Agents: episodes of several turns with an environment, as exact tokens.

What the policy samples is kept as token ids. What the environment says is rendered by the chat template's own turns,
`jaxrl_llm.data.turns`, and appended. Where a template does not append, or the conversation is compacted, a new row
begins with what goes on as its prompt; both rows are trained on with the episode's reward.
"""

from __future__ import annotations

import math
from asyncio import gather
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.data.turns import ChatTurns
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.expressions import part
from jaxrl_llm.rewards.of_environment import ENVIRONMENT
from jaxrl_llm.rollouts.agent_metrics import CALLS, FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.compaction import Compact
from jaxrl_llm.rollouts.conversations import Conversation, Limits, finished, messages_of, state_of
from jaxrl_llm.rollouts.environment_calls import EnvironmentFailed, answer, begun, closing, failed, observed
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import OBSERVATION, Rollout
from jaxrl_llm.rollouts.tools import Task, Tools


@part
def agent(
    environment: MakeEnvironment,
    turns: int = 8,
    turn_tokens: int | None = None,
    episode_tokens: int | None = None,
    turn_rewards: bool = False,
    greedy: bool = False,
    system: str | None = None,
    options: Mapping[str, Any] | None = None,
    fresh: bool = False,
    context_tokens: int | None = None,
    compact: Compact | None = None,
) -> Rollout:
    """Groups of episodes with an environment.

    environment: makes an environment from a row of the data set; see `environments.protocol`. turns, turn_tokens,
    episode_tokens, context_tokens, compact: see `Limits` and `rollouts.compaction`. greedy: take the most probable
    tokens, as an evaluation does. system: the system message of prompts that have none. options: of the chat template.
    fresh: each observation is the whole prompt of the next turn, which is a row of its own.

    The environment's reward is the component `environment` of the run's rewards: the sum of its final reward and those
    of all turns. turn_rewards: those of turns are the batch's `turn_rewards` instead, and the component is the final
    reward alone. A summary is a turn too, whose own reward is 0.

    An environment that fails in `reset` is made anew once; if it fails again, or in `close`, its episode is not scored.
    One that fails in `step` ends its episode there. Either is logged and counted.

    Provides turns, state_key, episode, first_turn, calls and failed_calls, and turn_rewards where asked.
    Raises InputError for compact without context_tokens, or with fresh.
    """
    limits = Limits(turns, turn_tokens, episode_tokens, context_tokens, compact, fresh)
    return _rollout("agent", _Play(environment, limits, 1, options, greedy, system), turn_rewards)


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
    return _rollout("self_play", _Play(environment, limits, players, options, greedy, system), turn_rewards)


@dataclass(frozen=True)
class _Play:
    """How a group's episodes are played."""

    make: MakeEnvironment
    limits: Limits
    players: int
    options: Mapping[str, Any] | None
    greedy: bool
    system: str | None


def _rollout(name: str, play: _Play, turn_rewards: bool) -> Rollout:
    limits, players = play.limits, play.players

    async def program(tools: Tools, task: Task) -> list[Episode]:
        games = await gather(*(_played(tools, task, number, play) for number in range(task.samples)))
        found = [game[player] for player in range(players) for game in games]
        ends = [replace(one.rows[-1], rewards={ENVIRONMENT: one.component(turn_rewards)}) for one in found]
        known = [end for one, end in zip(found, ends, strict=True) if one.scored]
        graded = iter(await tools.score(known) if known else [])
        ends = [next(graded) if one.scored else end.scored(math.nan) for one, end in zip(found, ends, strict=True)]
        rows = [finished(one, end, turn_rewards) for one, end in zip(found, ends, strict=True)]
        if players == 1:
            return [row for of_one in rows for row in of_one]
        return [row.in_part(n // task.samples) for n, of_one in enumerate(rows) for row in of_one]

    provides = {"turns", "state_key", "episode", "first_turn", *CALLS} | ({"turn_rewards"} if turn_rewards else set())
    longest = [limits.episode_tokens, limits.context_tokens]
    if limits.episode_tokens is None and limits.turn_tokens is not None and not limits.fresh:
        longest.append(limits.turns * (limits.turn_tokens + OBSERVATION))
    each = players * (limits.turns if limits.fresh or limits.compact is not None else 1)
    return Rollout(
        program, name, frozenset(provides), turns=1 if limits.fresh else limits.turns, ragged=True,
        longest=min((one for one in longest if one is not None), default=None), rewards=frozenset({ENVIRONMENT}),
        most=None if each == 1 else (lambda samples: each * samples),
    )  # fmt: skip


async def _played(tools: Tools, task: Task, number: int, play: _Play) -> list[Conversation]:
    """One episode of the task's group: the conversation of each player."""
    limits, players = play.limits, play.players
    seats = [
        Conversation([Episode(task.prompt, task.prompt_id, number + player * task.samples)], players * task.samples)
        for player in range(players)
    ]
    try:
        asked = messages_of(task.row, play.system)
        world, seen = await begun(tools, task, number, play.make)
        chat = ChatTurns(tools.tokenizer, tuple(world.tools), dict(play.options or {}))
        one = seats[_player(seen, players)]
        one.begin(tools, chat, [*asked, *seen.messages], task, limits)
    except (EnvironmentFailed, InputError) as error:
        failed(seats[0], task, number, f"in reset, so that its episode is not scored: {error}")
        return [_unscored(one) for one in seats]
    one.info = dict(seen.info)
    for move in range(players * limits.turns):
        one.states.append(state_of(seen))
        reply = await one.reply(tools, chat, task, limits, play.greedy)
        over = True
        try:
            seen = await observed(tools, world.step, reply, name=f"{number}/{move}")
            one.rewards.append(seen.reward)
            for name, value in seen.info.items():
                one.info[name] = one.info.get(name, 0.0) + float(value)
            over = seen.done or seen.truncated or one.rows[-1].truncated
            if not over:
                one = seats[_player(seen, players)]
                if not one.asked:
                    one.begin(tools, chat, [*asked, *seen.messages], task, limits)
                elif one.replies == limits.turns or not await one.go_on(
                    tools, chat, seen.messages, task, limits, play.greedy
                ):
                    over, seen = True, replace(seen, truncated=True)
        except (EnvironmentFailed, InputError) as error:
            failed(one, task, number, f"in step, where its episode ends: {error}")
            over, seen = True, Observation(truncated=True)
        if over:
            break
    cut = seen.truncated or any(one.rows[-1].truncated for one in seats)
    for one in seats:
        one.rewards += [0.0] * (len(one.states) - len(one.rewards))
        one.rows[-1] = replace(one.rows[-1], truncated=cut)
        one.scored = one.replies > 0
    try:
        _take_rewards(seats, await answer(tools, closing(world), name=f"{number}/close"))
    except EnvironmentFailed as error:
        if not any(FAILED_ENVIRONMENT in one.info for one in seats):
            failed(seats[0], task, number, f"in close, so that its episode is not scored: {error}")
            return [_unscored(one) for one in seats]
    return seats


def _player(seen: Observation, players: int) -> int:
    if not 0 <= seen.player < players:
        raise EnvironmentFailed(f"it is the turn of player {shown(seen.player)}, but {players} play, numbered from 0")
    return seen.player


def _take_rewards(seats: list[Conversation], rewards: Any) -> None:
    """Note what `close` returned: the final reward, or one for each of several players; None for none."""
    known = [rewards] if len(seats) == 1 else [None] * len(seats) if rewards is None else rewards
    if not isinstance(known, list) or len(known) != len(seats):
        raise EnvironmentFailed(
            f"it returns {shown(rewards)}, but must return a reward for each of {len(seats)} players"
        )
    try:
        finals = [0.0 if one is None else float(one) for one in known]
    except (TypeError, ValueError):
        raise EnvironmentFailed(f"it returns {shown(rewards)}, which is no reward") from None
    for one, final in zip(seats, finals, strict=True):
        one.final = final


def _unscored(one: Conversation) -> Conversation:
    one.scored = False
    return one
