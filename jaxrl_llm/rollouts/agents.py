"""Agents: episodes of several turns with an environment, as exact tokens.

What the policy samples is kept as token ids. What the environment says is rendered by the chat template's own turns,
`jaxrl_llm.data.turns`, and appended. Where a template does not append, or the conversation is compacted, a new row
begins with what goes on as its prompt; both rows are trained on with the episode's reward.
"""

from __future__ import annotations

import math
from asyncio import gather
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.data.calls import Reply
from jaxrl_llm.data.turns import ChatTurns
from jaxrl_llm.environments.copies import Replayable
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.errors import InputError
from jaxrl_llm.expressions import part
from jaxrl_llm.rewards.of_environment import ENVIRONMENT
from jaxrl_llm.rollouts.agent_metrics import CALLS, FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.compaction import Compact
from jaxrl_llm.rollouts.conversations import Conversation, Limits, finished, messages_of, state_of
from jaxrl_llm.rollouts.environment_calls import EnvironmentFailed, failed, final_rewards, observed, world_of
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.outside import AHEAD
from jaxrl_llm.rollouts.programs import OBSERVATION, Program, Rollout
from jaxrl_llm.rollouts.tools import Task, Tools


@dataclass(frozen=True)
class AgentSettings:
    """How the episodes of a rollout are made; see `agent`."""

    environment: MakeEnvironment
    limits: Limits = field(default_factory=Limits)
    turn_rewards: bool = False
    greedy: bool = False
    system: str | None = None
    options: Mapping[str, Any] | None = None


@dataclass
class Path:
    """An episode between two turns."""

    number: int  # of the sample
    one: Conversation
    world: Replayable | None = None  # None: it could not begin
    chat: ChatTurns | None = None
    seen: Observation = field(default_factory=Observation)
    turn: int = 0  # the next
    over: bool = False
    reply: Reply | None = None  # that the environment has not heard yet


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
    ahead: int | None = AHEAD,
) -> Rollout:
    """Groups of episodes with an environment.

    environment: makes an environment from a row of the data set; see `environments.protocol`. turns, turn_tokens,
    episode_tokens, context_tokens, compact: see `Limits` and `rollouts.compaction`. greedy: take the most probable
    tokens, as an evaluation does. system: the system message of prompts that have none. options: of the chat template.
    fresh: each observation is the whole prompt of the next turn, which is a row of its own. ahead: see `Rollout.ahead`.

    The environment's reward is the component `environment` of the run's rewards: the sum of its final reward and those
    of all turns. turn_rewards: those of turns are the batch's `turn_rewards` instead, and the component is the final
    reward alone. A summary is a turn too, whose own reward is 0.

    An environment that fails in `reset` is made anew once; if it fails again, or in `close`, its episode is not scored.
    One that fails in `step` ends its episode there. Either is logged and counted.

    Provides turns, state_key, episode, first_turn, calls and failed_calls, and turn_rewards where asked.
    Raises InputError for compact without context_tokens, or with fresh.
    """
    limits = Limits(turns, turn_tokens, episode_tokens, context_tokens, compact, fresh)
    settings = AgentSettings(environment, limits, turn_rewards, greedy, system, options)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        found = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
        return await graded(tools, found, turn_rewards)

    return of_agents(program, settings, ahead)


def of_agents(program: Program, settings: AgentSettings, ahead: int | None = AHEAD, players: int = 1) -> Rollout:
    """The rollout of a program whose episodes are conversations. ahead: see `Rollout.ahead`. players: that each has."""
    limits, turn_rewards = settings.limits, settings.turn_rewards
    provides = {"turns", "state_key", "episode", "first_turn", *CALLS} | ({"turn_rewards"} if turn_rewards else set())
    longest = [limits.episode_tokens, limits.context_tokens]
    if limits.episode_tokens is None and limits.turn_tokens is not None and not limits.fresh:
        longest.append(limits.turns * (limits.turn_tokens + OBSERVATION))
    each = players * (limits.turns if limits.fresh or limits.compact is not None else 1)
    return Rollout(
        program, "agent", frozenset(provides), turns=1 if limits.fresh else limits.turns, ragged=True,
        longest=min((one for one in longest if one is not None), default=None), rewards=frozenset({ENVIRONMENT}),
        most=None if each == 1 else (lambda samples: each * samples), ahead=ahead,
        agent=settings if players == 1 else None,
    )  # fmt: skip


async def graded(tools: Tools, found: Sequence[Conversation], turn_rewards: bool) -> list[Episode]:
    """The rows of finished conversations with their rewards."""
    ends = await ends_of(tools, found, turn_rewards)
    return [row for one, end in zip(found, ends, strict=True) for row in finished(one, end, turn_rewards)]


async def ends_of(tools: Tools, found: Sequence[Conversation], turn_rewards: bool) -> list[Episode]:
    """The last row of each episode, scored by the run's reward functions; NaN where the environment gave no reward."""
    ends = [replace(one.rows[-1], rewards={ENVIRONMENT: one.component(turn_rewards)}) for one in found]
    known = [end for one, end in zip(found, ends, strict=True) if one.scored]
    scores = iter(await tools.score(known) if known else [])
    return [next(scores) if one.scored else end.scored(math.nan) for one, end in zip(found, ends, strict=True)]


async def converse(tools: Tools, task: Task, number: int, settings: AgentSettings) -> Conversation:
    """One episode of the task's group."""
    path = await begun(tools, task, number, settings)
    while not path.over:
        await take_turn(tools, task, path, settings)
    return await closed(tools, task, path)


async def begun(tools: Tools, task: Task, number: int, settings: AgentSettings) -> Path:
    """An episode before its first turn; over, and not scored, if its environment cannot begin."""
    path = Path(number, Conversation([Episode(task.prompt, task.prompt_id, number)], task.samples))
    one = path.one
    try:
        asked = messages_of(task.row, settings.system)
        path.world, path.seen = await world_of(tools, task, number, settings.environment)
        path.chat = ChatTurns(tools.tokenizer, tuple(path.world.tools), dict(settings.options or {}))
        one.begin(tools, path.chat, [*asked, *path.seen.messages], task, settings.limits)
    except (EnvironmentFailed, InputError) as error:
        failed(one, task, number, "in reset, so that its episode is not scored", error)
        one.scored, path.over, path.world = False, True, None
        return path
    one.info, one.world = dict(path.seen.info), path.world
    return path


async def take_turn(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> None:
    """The next reply of an episode, and the environment's answer."""
    await draw_reply(tools, task, path, settings)
    await hear(tools, task, path, settings)


async def draw_reply(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> None:
    """The next reply of an episode."""
    assert path.chat is not None
    path.one.states.append(state_of(path.seen))
    path.reply = await path.one.reply(tools, path.chat, task, settings.limits, settings.greedy)


async def hear(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> None:
    """The environment's answer to the reply that was drawn last."""
    one, limits, seen, chat, reply = path.one, settings.limits, path.seen, path.chat, path.reply
    assert chat is not None
    assert path.world is not None
    assert reply is not None
    over = True
    try:
        seen = await observed(tools, path.world.step, reply, name=f"{path.number}/{path.turn}")
        note(one, seen)
        over = seen.done or seen.truncated or one.rows[-1].truncated
        if not over:
            over = path.turn + 1 == limits.turns or not await one.go_on(
                tools, chat, seen.messages, task, limits, settings.greedy
            )
            seen = replace(seen, truncated=over)
    except (EnvironmentFailed, InputError) as error:
        failed(one, task, path.number, "in step, where its episode ends", error)
        seen, over = Observation(truncated=True), True
    path.seen, path.over, path.turn, path.reply = seen, over, path.turn + 1, None


def note(one: Conversation, seen: Observation) -> None:
    """Keep the reward and the numbers of a turn."""
    one.rewards.append(seen.reward)
    for name, value in seen.info.items():
        one.info[name] = one.info.get(name, 0.0) + float(value)


async def closed(tools: Tools, task: Task, path: Path) -> Conversation:
    """The episode with the final reward of its environment, which ends."""
    one = path.one
    if path.world is None:
        return one
    one.rewards += [0.0] * (len(one.states) - len(one.rewards))
    one.rows[-1] = replace(one.rows[-1], truncated=one.rows[-1].truncated or path.seen.truncated)
    try:
        (one.final,) = await final_rewards(tools, path.world, 1, name=f"{path.number}/close")
    except EnvironmentFailed as error:
        if FAILED_ENVIRONMENT not in one.info:
            failed(one, task, path.number, "in close, so that its episode is not scored", error)
            one.scored = False
    return one
