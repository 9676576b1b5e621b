"""Agents: episodes of several turns with an environment, as exact tokens.

What the policy samples is kept as token ids. What the environment says is rendered by the chat template's own turns,
`jaxrl_llm.data.chat.turns`, and appended. Where a template does not append, or the conversation is compacted, a new row
begins with what goes on as its prompt; both rows are trained on with the episode's reward.
"""

from __future__ import annotations

import math
from asyncio import gather
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.core.ranges import Count
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import AHEAD, OBSERVATION, Demands, Program, Rollout
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.chat.encode import format_of
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.copies import Replayable
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.rewards.environment import ENVIRONMENT
from jaxrl_llm.rollouts.agents.compaction import Compact
from jaxrl_llm.rollouts.agents.conversation import Conversation, Limits, finished, messages_of, state_of
from jaxrl_llm.rollouts.agents.environment_calls import (
    EnvironmentFailed,
    answer,
    failed,
    final_rewards,
    observed,
    tell_of_beginnings,
    world_of,
)
from jaxrl_llm.rollouts.agents.metrics import CALLS, FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.utils.errors import InputError, shown


@dataclass(frozen=True)
class AgentSettings:
    """How the episodes of a rollout are made; see `agent`."""

    environment: MakeEnvironment
    limits: Limits = field(default_factory=Limits)
    turn_rewards: bool = False
    greedy: bool = False
    system: str | None = None
    format: PromptFormat = field(default_factory=PromptFormat)

    def chat(self, tokenizer: Any, row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> ChatTurns:
        """How the conversation of a row with these tools goes on."""
        return ChatTurns(tokenizer, tuple(tools), format_of(self.format, row))


@dataclass
class Path:
    """An episode between two turns."""

    number: int  # of the sample
    seats: list[Conversation]  # of each player
    world: Replayable | None = None  # None: it could not begin
    chat: ChatTurns | None = None
    seen: Observation = field(default_factory=Observation)
    turn: int = 0  # the next
    over: bool = False
    reply: Reply | None = None  # that the environment has not heard yet
    player: int = 0  # who is to reply

    @property
    def one(self) -> Conversation:
        """The conversation of the player who is to reply."""
        return self.seats[self.player]


@part
def agent(
    environment: MakeEnvironment,
    turns: Count = 8,
    turn_tokens: Count | None = None,
    episode_tokens: Count | None = None,
    turn_rewards: bool = False,
    greedy: bool = False,
    system: str | None = None,
    format: PromptFormat | None = None,
    fresh: bool = False,
    context_tokens: Count | None = None,
    compact: Compact | None = None,
    ahead: Count | None = AHEAD,
) -> Rollout:
    """Groups of episodes with an environment.

    environment: makes an environment from a row of the data set; see `environments.protocol`. turns, turn_tokens,
    episode_tokens, context_tokens, compact: see `Limits` and `rollouts.agents.compaction`. greedy: take the most
    probable tokens, as an evaluation does. system: the system message of prompts that have none. format: of the
    conversation. fresh: each observation is the whole prompt of the next turn, which is a row of its own. ahead: see
    `Demands.max_wait_steps`.

    The environment's reward is the component `environment` of the run's rewards: the sum of its final reward and those
    of all turns. turn_rewards: those of turns are the batch's `turn_rewards` instead, and the component is the final
    reward alone. A summary is a turn too, whose own reward is 0.

    An environment that fails in `reset` is made anew once; if it fails again, or in `close`, its episode is not scored.
    One that fails in `step` ends its episode there. Either is logged and counted.

    Provides turns, state_key, episode, first_turn, calls and failed_calls, and turn_rewards and, with fresh,
    fresh_prompts where asked.
    Raises InputError for compact without context_tokens, or with fresh.
    """
    limits = Limits(turns, turn_tokens, episode_tokens, context_tokens, compact, fresh)
    settings = AgentSettings(environment, limits, turn_rewards, greedy, system, format or PromptFormat())

    return of_agents(plays(settings), settings, ahead)


def plays(settings: AgentSettings, players: int = 1) -> Program:
    """The program of episodes, each with a conversation of each player: those of the first player come first."""

    async def program(tools: Tools, task: Task) -> list[Episode]:
        games = await gather(*(converse(tools, task, number, settings, players) for number in range(task.samples)))
        tell_of_beginnings([one.world for one, *_ in games if one.world is not None])
        found = [game[player] for player in range(players) for game in games]
        rows = await graded(tools, found, settings.turn_rewards)
        if players == 1:
            return [row for of_one in rows for row in of_one]
        return [row.in_part(n // task.samples) for n, of_one in enumerate(rows) for row in of_one]

    return program


def of_agents(program: Program, settings: AgentSettings, ahead: int | None = AHEAD, players: int = 1) -> Rollout:
    """The rollout of a program whose episodes are conversations, each with `players`.

    ahead: see `Demands.max_wait_steps`.
    """
    limits, turn_rewards = settings.limits, settings.turn_rewards
    provides = {"turns", "state_key", "episode", "first_turn", *CALLS}
    provides |= ({"turn_rewards"} if turn_rewards else set()) | ({"fresh_prompts"} if limits.fresh else set())
    longest = [limits.episode_tokens, limits.context_tokens]
    if limits.episode_tokens is None and limits.turn_tokens is not None and not limits.fresh:
        longest.append(limits.turns * (limits.turn_tokens + OBSERVATION))
    each = players * (limits.turns if limits.fresh or limits.compact is not None else 1)
    return Rollout(
        program,
        "agent",
        frozenset({*provides, ENVIRONMENT}),
        agent=settings if players == 1 else None,
        demands=Demands(
            turns=1 if limits.fresh else limits.turns,
            variable_size=True,
            longest=min((one for one in longest if one is not None), default=None),
            max_episodes=None if each == 1 else (lambda samples: each * samples),
            max_wait_steps=ahead,
        ),
    )


def settings_of(rollout: Rollout, what: str) -> AgentSettings:
    """How a rollout of agents makes its episodes. InputError, which begins with `what`, for another rollout."""
    if rollout.agent is None:
        raise InputError(
            f"{what}, but the rollout {rollout.name} has none: give --environment MODULE:NAME, --tools, or a --rollout "
            "that returns rollouts.agents.agent(ENVIRONMENT)"
        )
    return rollout.agent


async def graded(tools: Tools, found: Sequence[Conversation], turn_rewards: bool) -> list[list[Episode]]:
    """The rows of each finished conversation with their rewards."""
    ends = await ends_of(tools, found, turn_rewards)
    return [finished(one, end, turn_rewards) for one, end in zip(found, ends, strict=True)]


async def ends_of(tools: Tools, found: Sequence[Conversation], turn_rewards: bool) -> list[Episode]:
    """The last row of each episode, scored by the run's reward functions; NaN where the environment gave no reward."""
    ends = [replace(one.rows[-1], rewards={ENVIRONMENT: one.component(turn_rewards)}, talk=one.talk) for one in found]
    known = [end for one, end in zip(found, ends, strict=True) if one.scored]
    scores = iter(await tools.score(known) if known else [])
    return [next(scores) if one.scored else end.scored(math.nan) for one, end in zip(found, ends, strict=True)]


async def converse(
    tools: Tools, task: Task, number: int, settings: AgentSettings, players: int = 1
) -> list[Conversation]:
    """One episode of the task's group: the conversation of each player."""
    path = await begun(tools, task, number, settings, players)
    while not path.over:
        await take_turn(tools, task, path, settings)
    return await closed(tools, task, path)


async def begun(tools: Tools, task: Task, number: int, settings: AgentSettings, players: int = 1) -> Path:
    """An episode before its first turn; over, and not scored, if its environment cannot begin."""
    samples, stride = [number + player * task.samples for player in range(players)], players * task.samples
    seats = [Conversation([Episode(task.prompt, task.prompt_id, sample)], stride) for sample in samples]
    path = Path(number, seats)
    try:
        path.world, path.seen = await world_of(tools, task, number, settings.environment)
        path.chat = settings.chat(tools.tokenizer, task.row, path.world.tools)
        path.player = player_of(path.seen, players)
        begin(tools, task, path, settings)
    except (EnvironmentFailed, InputError) as error:
        failed(seats[0], task, number, "in reset, so that its episode is not scored", error)
        if path.world is not None:  # it began, but its messages leave no room
            with suppress(EnvironmentFailed):
                await answer(tools, path.world.close, name=f"{number}/close")
        path.over, path.world = True, None
        for one in seats:
            one.scored = False
        return path
    fresh = {"fresh_prompts": 1.0} if settings.limits.fresh else {}
    path.one.info = {**path.seen.info, **fresh}
    for one in seats:
        one.world = path.world
    return path


def begin(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> None:
    """Begin the conversation of the player who is to reply."""
    assert path.chat is not None
    asked = messages_of(task.row, settings.system)
    path.one.begin(tools, path.chat, [*asked, *path.seen.messages], task, settings.limits)


def player_of(seen: Observation, players: int) -> int:
    """Who is to reply. EnvironmentFailed for a player who does not play."""
    if players > 1 and not 0 <= seen.player < players:
        raise EnvironmentFailed(f"it is the turn of player {shown(seen.player)}, but {players} play, numbered from 0")
    return seen.player if players > 1 else 0


async def take_turn(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> None:
    """The next reply of an episode, and the environment's answer."""
    await draw_reply(tools, task, path, settings)
    await hear(tools, task, path, settings)


async def draw_reply(tools: Tools, task: Task, path: Path, settings: AgentSettings, begin: Sequence[int] = ()) -> None:
    """The next reply of an episode. begin: tokens that it is given to begin with."""
    assert path.chat is not None
    path.one.states.append(state_of(path.seen))
    path.reply = await path.one.reply(tools, path.chat, task, settings.limits, settings.greedy, begin)


async def hear(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> None:
    """The environment's answer to the reply that was drawn last."""
    assert path.world is not None
    try:
        path.seen = seen = await observed(tools, path.world.step, path.reply, name=f"{path.number}/{path.turn}")
        note(path.one, seen)
        path.over = seen.done or seen.truncated or path.one.rows[-1].truncated
        if not path.over:
            path.player = player_of(seen, len(path.seats))
        if path.one.asked:  # else the messages begin the conversation of the player
            path.one.said += seen.messages
        if not path.over:
            path.over = not await _goes_on(tools, task, path, settings)
            path.seen = replace(seen, truncated=path.over)
    except (EnvironmentFailed, InputError) as error:
        failed(path.one, task, path.number, "in step, where its episode ends", error)
        path.seen, path.over = Observation(truncated=True), True
    path.turn, path.reply = path.turn + 1, None


async def _goes_on(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> bool:
    """Tell the player who is to reply what the environment said. Returns whether the limits leave it a reply."""
    one, chat, limits = path.one, path.chat, settings.limits
    assert chat is not None
    if not one.asked:
        begin(tools, task, path, settings)
        return True
    return one.replies < limits.turns and await one.go_on(
        tools, chat, path.seen.messages, task, limits, settings.greedy
    )


def note(one: Conversation, seen: Observation) -> None:
    """Keep the reward and the numbers of a turn."""
    one.rewards.append(seen.reward)
    for name, value in seen.info.items():
        one.info[name] = one.info.get(name, 0.0) + float(value)


async def closed(tools: Tools, task: Task, path: Path) -> list[Conversation]:
    """The conversations of an episode with the final rewards of its environment, which ends.

    A player who never replied is not scored, and an episode that is cut off is so for all.
    """
    seats = path.seats
    if path.world is None:
        return seats
    cut = path.seen.truncated or any(one.rows[-1].truncated for one in seats)
    for one in seats:
        one.rewards += [0.0] * (len(one.states) - len(one.rewards))
        one.rows[-1] = replace(one.rows[-1], truncated=cut)
        one.scored = one.replies > 0
    try:
        finals = await final_rewards(tools, path.world, len(seats), name=f"{path.number}/close")
        for one, final in zip(seats, finals, strict=True):
            one.final = final
    except EnvironmentFailed as error:
        if not any(FAILED_ENVIRONMENT in one.info for one in seats):
            failed(seats[0], task, path.number, "in close, so that its episode is not scored", error)
            for one in seats:
                one.scored = False
    return seats
