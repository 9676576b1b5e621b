"""Agents: episodes of several turns with an environment, as exact tokens.

What the policy samples is kept as token ids. What the environment says is rendered by the chat template's own turns,
`jaxrl_llm.data.turns`, and appended. Where a template does not append, a new row begins with the conversation so far as
its prompt; both rows are trained on with the episode's reward.
"""

from __future__ import annotations

import logging
import math
from asyncio import gather
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.data.calls import Message
from jaxrl_llm.data.chat import is_conversation
from jaxrl_llm.data.turns import ChatTurns
from jaxrl_llm.environments.copies import Replayable
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.errors import InputError
from jaxrl_llm.expressions import part
from jaxrl_llm.rewards.of_environment import ENVIRONMENT
from jaxrl_llm.rollouts.agent_metrics import CALLS, COUNTS, FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.episode import Episode, checksum, given
from jaxrl_llm.rollouts.outside import AHEAD
from jaxrl_llm.rollouts.programs import OBSERVATION, Program, Rollout
from jaxrl_llm.rollouts.tools import FAILED, Task, Tools
from jaxrl_llm.threads import called, in_thread

logger = logging.getLogger("jaxrl_llm.rollouts")


@dataclass(frozen=True)
class Limits:
    """How long an episode may be."""

    turns: int = 8
    """Replies of an episode."""
    turn_tokens: int | None = None
    """Sampled tokens of a reply; None: the run's limit of a completion."""
    episode_tokens: int | None = None
    """Tokens of an episode after its prompt, observations included; None: as the model's context allows."""
    fresh: bool = False
    """Whether an observation is the whole prompt of the next turn."""


@dataclass
class Conversation:
    """One episode: its rows, the last of which goes on, and what the environment said."""

    rows: list[Episode]
    messages: list[Message]
    rewards: list[float] = field(default_factory=list)  # of each turn
    final: float = 0.0  # the reward of the whole
    states: list[str] = field(default_factory=list)  # before each turn
    info: dict[str, float] = field(default_factory=dict)
    scored: bool = True  # whether the environment could give its final reward
    before: list[int] = field(default_factory=list)  # messages before each turn
    world: Replayable | None = None

    def component(self, turn_rewards: bool) -> float:
        """The component `environment` of the reward: the sum of all, or without those of turns. NaN: not scored."""
        total = self.final + (0.0 if turn_rewards else math.fsum(self.rewards))
        return total if self.scored and math.isfinite(total) else math.nan


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


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered what is no observation."""


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
    ahead: int | None = AHEAD,
) -> Rollout:
    """Groups of episodes with an environment.

    environment: makes an environment from a row of the data set; see `environments.protocol`. turns, turn_tokens,
    episode_tokens: see `Limits`. greedy: take the most probable tokens, as an evaluation does. system: the system
    message of prompts that have none. options: of the chat template. fresh: each observation is the whole prompt of the
    next turn, which is a row of its own. ahead: see `Rollout.ahead`.

    The environment's reward is the component `environment` of the run's rewards: the sum of its final reward and those
    of all turns. turn_rewards: those of turns are the batch's `turn_rewards` instead, and the component is the final
    reward alone.

    An environment that fails in `reset` is made anew once; if it fails again, or in `close`, its episode is not scored.
    One that fails in `step` ends its episode there. Either is logged and counted.

    Provides turns, state_key, episode, first_turn, calls and failed_calls, and turn_rewards where asked.
    """
    limits = Limits(turns, turn_tokens, episode_tokens, fresh)
    settings = AgentSettings(environment, limits, turn_rewards, greedy, system, options)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        found = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
        return await graded(tools, found, turn_rewards)

    return of_agents(program, settings, ahead)


def of_agents(program: Program, settings: AgentSettings, ahead: int | None = AHEAD) -> Rollout:
    """The rollout of a program whose episodes are conversations. ahead: see `Rollout.ahead`."""
    limits, turn_rewards = settings.limits, settings.turn_rewards
    provides = {"turns", "state_key", "episode", "first_turn", *CALLS} | ({"turn_rewards"} if turn_rewards else set())
    longest, turns = limits.episode_tokens, limits.turns
    if longest is None and limits.turn_tokens is not None and not limits.fresh:
        longest = turns * (limits.turn_tokens + OBSERVATION)
    return Rollout(
        program, "agent", frozenset(provides), turns=1 if limits.fresh else turns, ragged=True, longest=longest,
        rewards=frozenset({ENVIRONMENT}), most=(lambda samples: turns * samples) if limits.fresh else None,
        ahead=ahead, agent=settings,
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
    path = Path(number, Conversation([Episode(task.prompt, task.prompt_id, number)], []))
    one = path.one
    try:
        path.world, path.seen = await _begun(tools, task, number, settings.environment)
        path.chat = ChatTurns(tools.tokenizer, tuple(path.world.tools), dict(settings.options or {}))
        one.messages = merged([*_messages_of(task.row, settings.system), *path.seen.messages])
        one.rows[0] = replace(one.rows[0], prompt=tuple(path.chat.begin(one.messages)))
    except (EnvironmentFailed, InputError) as error:
        _failed(one, task, number, f"in reset, so that its episode is not scored: {error}")
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
    one = path.one
    one.states.append(_state(path.seen))
    one.before.append(len(one.messages))
    one.rows[-1] = await tools.sample(one.rows[-1], limit=_room(one, task, settings.limits), greedy=settings.greedy)


async def hear(tools: Tools, task: Task, path: Path, settings: AgentSettings) -> None:
    """The environment's answer to the reply that was drawn last."""
    one, limits, seen = path.one, settings.limits, path.seen
    assert path.chat is not None
    assert path.world is not None
    reply = path.chat.reading(one.rows[-1].last)
    one.messages.append(reply.message)
    over = True
    try:
        seen = await _observed(tools, path.world.step, reply, name=f"{path.number}/{path.turn}")
        one.rewards.append(seen.reward)
        for name, value in seen.info.items():
            one.info[name] = one.info.get(name, 0.0) + float(value)
        over = seen.done or seen.truncated or one.rows[-1].truncated
        if not over:
            one.messages = merged(seen.messages) if limits.fresh else [*one.messages, *seen.messages]
            over = path.turn + 1 == limits.turns or not _append(one, tools, path.chat, seen.messages, task, limits)
            seen = replace(seen, truncated=over)
    except (EnvironmentFailed, InputError) as error:
        _failed(one, task, path.number, f"in step, where its episode ends: {error}")
        one.rewards += [0.0] * (path.turn + 1 - len(one.rewards))
        seen = Observation(truncated=True)
    path.seen, path.over, path.turn = seen, over, path.turn + 1


async def closed(tools: Tools, task: Task, path: Path) -> Conversation:
    """The episode with the final reward of its environment, which ends."""
    one = path.one
    if path.world is None:
        return one
    one.rows[-1] = replace(one.rows[-1], truncated=one.rows[-1].truncated or path.seen.truncated)
    try:
        last = await _answer(tools, path.world.close, name=f"{path.number}/close")
        one.final = 0.0 if last is None else float(last)
    except EnvironmentFailed as error:
        if FAILED_ENVIRONMENT not in one.info:
            _failed(one, task, path.number, f"in close, so that its episode is not scored: {error}")
            one.scored = False
    return one


async def _begun(tools: Tools, task: Task, number: int, make: MakeEnvironment) -> tuple[Replayable, Observation]:
    """An environment and its first observation; made anew once if it fails.

    The samples of a group have environments of one seed, so that their rewards can be compared.
    """
    seed = int(tools.random("environment").integers(2**31))
    made: list[Replayable] = []

    async def begin() -> Observation:
        made.append(await in_thread(Replayable, make, task.row))
        return await called(made[-1].reset, dict(task.row), seed)

    try:
        seen = await _observed(tools, begin, name=f"{number}/reset")
    except EnvironmentFailed:
        seen = await _observed(tools, begin, name=f"{number}/reset again")
    return made[-1], seen


async def copied(tools: Tools, world: Replayable, name: str, turns: int | None = None) -> Replayable:
    """A copy of an environment within an episode, which a fork goes on with; see `Replayable.copy`.

    name: of the call, unique in the group. The caller closes the copy too. EnvironmentFailed if there can be none.
    """
    made: list[Replayable] = []

    async def copy() -> int:
        made.append(await world.copy(turns))
        return len(made[0].seen) - 1

    await _answer(tools, copy, name=name)
    return made[0]


def _failed(one: Conversation, task: Task, number: int, why: str) -> None:
    one.info[FAILED_ENVIRONMENT] = 1.0
    logger.warning("the environment of sample %d of prompt %d failed %s", number, task.prompt_id, why)


def _room(one: Conversation, task: Task, limits: Limits) -> int:
    """Most tokens of the next reply."""
    reply = task.limit if limits.turn_tokens is None else limits.turn_tokens
    used = sum(row.size for row in one.rows)
    return reply if limits.episode_tokens is None else min(reply, limits.episode_tokens - used)


def _append(
    one: Conversation, tools: Tools, chat: ChatTurns, messages: Sequence[Message], task: Task, limits: Limits
) -> bool:
    """Append an observation to the conversation's last row, or begin a new row. Returns whether there is room."""
    row = one.rows[-1]
    delta = None if limits.fresh else chat.bridge(messages, row.last[-1] if row.last else None)
    if delta is not None:
        longer = row + given(delta)
    else:
        longer = Episode(tuple(chat.begin(one.messages)), row.prompt_id, row.sample + task.samples)
    rows = [*one.rows[:-1], longer] if delta is not None else [*one.rows, longer]
    if not tools.fits(longer.tokens) or _room(replace(one, rows=rows), task, limits) < 1:
        return False
    one.rows = rows
    one.info["new_rows"] = one.info.get("new_rows", 0.0) + (delta is None and not limits.fresh)
    return True


def finished(one: Conversation, end: Episode, turn_rewards: bool) -> list[Episode]:
    """The rows of an episode with its reward. end: its last row, scored by the run's reward functions."""
    assert end.reward is not None
    parts = {ENVIRONMENT: one.component(turn_rewards), **end.rewards}
    info = {**dict.fromkeys(COUNTS, 0.0), **one.info, "episode": float(one.rows[0].sample)}
    rows, turn = [], 0
    for row in one.rows:
        count = int(row.turns.max(initial=-1)) + 1
        own = tuple(one.rewards[turn : turn + count]) if turn_rewards else ()
        keys = tuple(checksum(np.frombuffer(state.encode(), np.uint8)) for state in one.states[turn : turn + count])
        rows.append(
            replace(row, state_keys=keys, turn_rewards=own)
            .scored(end.reward, parts, end.entries)
            .with_info(**info, first_turn=float(turn))
        )
        turn += count
    return rows


def merged(messages: Sequence[Message]) -> list[Message]:
    """The messages, where those of a user that follow each other are one, as many chat templates want it."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1]["role"] == message["role"] == "user":
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append(dict(message))
    return out


def _messages_of(row: Mapping[str, Any], system: str | None = None) -> list[Message]:
    prompt: Any = row.get("prompt")
    if not isinstance(prompt, str) and not is_conversation(prompt):
        raise InputError("an agent's prompts are texts or messages, which its environment's come after")
    texts: Any = [{"role": "user", "content": prompt}] * bool(prompt)
    asked: list[Message] = texts if isinstance(prompt, str) else [*map(dict, prompt)]
    has_own = bool(asked) and asked[0].get("role") == "system"
    return asked if system is None or has_own else [{"role": "system", "content": system}, *asked]


def _state(seen: Observation) -> str:
    return repr([dict(message) for message in seen.messages]) if seen.state is None else seen.state


async def _answer(tools: Tools, method: Any, *arguments: Any, name: str) -> Any:
    """What a method of the environment returns, by way of the log. EnvironmentFailed if it raises or hangs."""

    async def call() -> Any:
        return await called(method, *arguments)

    found = await tools.call(call, name=name, again=True, failing=True)
    if isinstance(found, dict) and set(found) == {FAILED}:
        raise EnvironmentFailed(found[FAILED])
    return found


async def _observed(tools: Tools, method: Any, *arguments: Any, name: str) -> Observation:
    """An observation from a method of the environment, as `_answer`."""

    async def observation() -> Any:
        found = await called(method, *arguments)
        return replace(
            found, reward=float(found.reward), done=bool(found.done), truncated=bool(found.truncated),
            info={name: float(value) for name, value in found.info.items()},
        ).as_json()  # fmt: skip

    return Observation(**await _answer(tools, observation, name=name))
