"""Agents: episodes of several turns with an environment, as exact tokens.

What the policy samples is kept as token ids. What the environment says is rendered by the chat template's own turns,
`jaxrl_llm.data.turns`, and appended. Where a template does not append, a new row begins with the conversation so far as
its prompt; both rows are trained on with the episode's reward.
"""

from __future__ import annotations

import inspect
from asyncio import gather
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.data.chat import is_conversation
from jaxrl_llm.data.turns import ChatTurns, Message
from jaxrl_llm.environments.protocol import Environment, MakeEnvironment, Observation
from jaxrl_llm.errors import InputError
from jaxrl_llm.expressions import part
from jaxrl_llm.rollouts.episode import Episode, checksum, given
from jaxrl_llm.rollouts.programs import Rollout
from jaxrl_llm.rollouts.tools import Task, Tools

CALLS = ("calls", "failed_calls")  # of tools, which environments count


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
    states: list[str] = field(default_factory=list)  # before each turn
    info: dict[str, float] = field(default_factory=dict)
    failed: str | None = None  # why the environment failed


@part
def agent(
    environment: MakeEnvironment,
    turns: int = 8,
    turn_tokens: int | None = None,
    episode_tokens: int | None = None,
    turn_rewards: bool = False,
    scored: bool = True,
    options: Mapping[str, Any] | None = None,
    fresh: bool = False,
) -> Rollout:
    """Groups of episodes with an environment.

    environment: makes an environment from a row of the data set; see `environments.protocol`. turns, turn_tokens,
    episode_tokens: see `Limits`. turn_rewards: the environment's rewards of turns are the batch's `turn_rewards`, and
    the episode's reward is what is beside them; without it the reward is the sum of all. scored: the run's reward
    functions score the episodes too, and their reward is added. options: of the chat template. fresh: each observation
    is the whole prompt of the next turn, which is a row of its own.

    Provides turns, state_key, episode, first_turn, calls and failed_calls, and turn_rewards where asked.
    """
    limits = Limits(turns, turn_tokens, episode_tokens, fresh)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        found = await gather(*(converse(tools, task, n, environment, limits, options) for n in range(task.samples)))
        ends = [one.rows[-1] for one in found]
        graded = await tools.score(ends) if scored else [end.scored(0.0) for end in ends]
        return [row for one, end in zip(found, graded, strict=True) for row in finished(one, end, turn_rewards)]

    provides = {"turns", "state_key", "episode", "first_turn", *CALLS} | ({"turn_rewards"} if turn_rewards else set())
    most = (lambda samples: turns * samples) if fresh else None
    return Rollout(program, "agent", frozenset(provides), turns=1 if fresh else turns, ragged=True, most=most)


async def converse(
    tools: Tools, task: Task, number: int, make: MakeEnvironment, limits: Limits, options: Mapping[str, Any] | None
) -> Conversation:
    """One episode of the task's group."""
    world = make(task.row)
    chat = ChatTurns(tools.tokenizer, tuple(world.tools), dict(options or {}))
    seed = int(tools.random(f"environment {number}").integers(2**31))
    opened = await _ask(tools, world.reset, dict(task.row), seed, name=f"{number}/reset")
    messages = merged([*_messages_of(task.row), *opened.messages])
    start = Episode(tuple(chat.begin(messages)), task.prompt_id, number)
    one = Conversation([start], messages, info={**dict.fromkeys(CALLS, 0.0), **opened.info})
    seen = opened
    for turn in range(limits.turns):
        one.states.append(_state(seen))
        one.rows[-1] = await tools.sample(one.rows[-1], limit=_room(one.rows[-1], task, limits))
        reply = chat.reading(one.rows[-1].last)
        one.messages.append(reply.message)
        seen = await _ask(tools, world.step, reply, name=f"{number}/{turn}")
        one.rewards.append(float(seen.reward))
        for name, value in seen.info.items():
            one.info[name] = one.info.get(name, 0.0) + float(value)
        if seen.done or seen.truncated or one.rows[-1].truncated:
            break
        one.messages = merged(seen.messages) if limits.fresh else [*one.messages, *seen.messages]
        if turn + 1 == limits.turns or not _append(one, tools, chat, seen.messages, task, limits):
            seen = replace(seen, truncated=True)
            break
    one.rows[-1] = replace(one.rows[-1], truncated=one.rows[-1].truncated or seen.truncated)
    last = await tools.call(_closing(world), name=f"{number}/close", again=True)
    if last is not None:
        one.rewards[-1] += float(last)
    return one


def _room(row: Episode, task: Task, limits: Limits) -> int:
    """Most tokens of the next reply."""
    reply = task.limit if limits.turn_tokens is None else limits.turn_tokens
    return reply if limits.episode_tokens is None else min(reply, limits.episode_tokens - row.size)


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
    if not tools.fits(longer.tokens) or _room(longer, task, limits) < 1:
        return False
    if delta is not None:
        one.rows[-1] = longer
    else:
        one.rows.append(longer)
        if not limits.fresh:
            one.info["new_rows"] = one.info.get("new_rows", 0.0) + 1
    return True


def finished(one: Conversation, end: Episode, turn_rewards: bool) -> list[Episode]:
    """The rows of an episode with its reward. end: its last row, scored by the run's reward functions."""
    outcome = 0.0 if end.reward is None else end.reward
    total = float(sum(one.rewards))
    reward = outcome if turn_rewards else outcome + total
    rows, turn = [], 0
    for row in one.rows:
        count = int(row.turns.max(initial=-1)) + 1
        own = tuple(one.rewards[turn : turn + count]) if turn_rewards else ()
        keys = tuple(checksum(np.frombuffer(state.encode(), np.uint8)) for state in one.states[turn : turn + count])
        rows.append(
            replace(row, state_keys=keys, turn_rewards=own)
            .scored(reward, {**end.rewards, "environment": total}, end.entries)
            .with_info(episode=float(one.rows[0].sample), first_turn=float(turn), **one.info)
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


def _messages_of(row: Mapping[str, Any]) -> list[Message]:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if prompt else []
    if is_conversation(prompt):
        return [dict(message) for message in prompt]  # type: ignore[union-attr]
    raise InputError("an agent's prompts are texts or messages, which its environment's come after")


def _state(seen: Observation) -> str:
    return repr([dict(message) for message in seen.messages]) if seen.state is None else seen.state


async def _ask(tools: Tools, method: Any, *arguments: Any, name: str) -> Observation:
    """An observation from a method of the environment, by way of the log."""

    async def asynchronous() -> Any:
        return (await method(*arguments)).as_json()

    def plain() -> Any:
        return method(*arguments).as_json()

    function = asynchronous if inspect.iscoroutinefunction(method) else plain
    return Observation(**await tools.call(function, name=name, again=True))


def _closing(world: Environment) -> Any:
    close = getattr(world, "close", None)
    return close if close is not None else (lambda: None)
