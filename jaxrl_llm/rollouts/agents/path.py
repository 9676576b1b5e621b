"""An episode with an environment, turn by turn, and how it was before each of its turns."""

from __future__ import annotations

import logging
from asyncio import gather
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.chat.encode import row_format
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.copies import Replayable
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.rollouts.agents.branches import BranchPoint, go_on
from jaxrl_llm.rollouts.agents.compaction import Limits
from jaxrl_llm.rollouts.agents.conversation import Conversation
from jaxrl_llm.rollouts.agents.environment_calls import (
    EnvironmentFailed,
    answer,
    copied,
    failed,
    final_rewards,
    observe,
    world_of,
)
from jaxrl_llm.rollouts.agents.messages import messages_of
from jaxrl_llm.rollouts.agents.metrics import FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.utils.errors import InputError, shown

logger = logging.getLogger("jaxrl_llm.rollouts")


@dataclass(frozen=True)
class AgentSettings:
    """How the episodes of a rollout are made; see `agent`."""

    environment: MakeEnvironment
    limits: Limits = field(default_factory=Limits)
    turn_rewards: bool = False
    greedy: bool = False
    system: str | None = None
    format: PromptFormat = field(default_factory=PromptFormat)
    players: int = 1

    def chat(self, tokenizer: Any, row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> ChatTurns:
        """How the conversation of a row with these tools goes on."""
        return ChatTurns(tokenizer, tuple(tools), row_format(self.format, row))


@dataclass
class Path:
    """An episode of a group between two turns. `begun` makes it, `take_turn` goes on, `close` ends it."""

    tools: Tools
    task: Task
    settings: AgentSettings
    number: int  # of the sample
    seats: list[Conversation]  # of each player
    world: Replayable | None = None  # None: it could not begin
    chat: ChatTurns | None = None
    seen: Observation = field(default_factory=Observation)
    turn: int = 0  # the next
    over: bool = False
    reply: Reply | list[Reply] | None = None  # that the environment has not heard yet, or all that it asked for
    player: int = 0  # who is to reply
    past: list[Path] = field(default_factory=list)  # the episode before each of its replies

    @property
    def one(self) -> Conversation:
        """The conversation of the player who is to reply."""
        return self.seats[self.player]

    def before(self, turn: int, number: int) -> Path:
        """The episode before its reply `turn`, as sample `number`, with the environment of this one.

        With a copy of that it goes on by itself, and is closed by itself.
        """
        then = self.past[turn]
        seats = [one.copy(number - then.number) for one in then.seats]
        return replace(then, number=number, seats=seats, past=self.past[:turn])

    async def copy_world(self) -> None:
        """Go on with a copy of the environment, as it was before the next turn; see `environment_calls.copied`.

        Raises EnvironmentFailed if there can be no copy.
        """
        assert self.world is not None
        self.world = await copied(self.tools, self.world, name=f"{self.number}/from {self.turn}", turns=self.turn)
        for one in self.seats:
            one.world = self.world

    async def has_copy(self) -> bool:
        """`copy_world`; False, which is said, if there can be no copy, so that the sample is to be played anew."""
        try:
            await self.copy_world()
        except EnvironmentFailed as error:
            logger.warning("prompt %d: %s; sample %d is an episode of its own", self.task.prompt_id, error, self.number)
            return False
        return True

    async def take_turn(self) -> None:
        """The next reply, and the environment's answer."""
        await self.draw()
        await self.hear()

    async def draw(self, begin: Sequence[int] = ()) -> None:
        """The next reply. begin: tokens that it is given to begin with, fewer than a reply may have."""
        one, limits, greedy = self.one, self.settings.limits, self.settings.greedy

        async def drawn(place: int) -> Episode:
            room = one.room(self.task, limits, place) - len(begin)
            row = one.rows[place] + given(begin) if len(begin) else one.rows[place]
            return await self.tools.sample(row, limit=room, greedy=greedy, snapshot=one.snapshot)

        self.take(*await gather(*map(drawn, range(-one.asking, 0))), begin=begin)

    def take(self, *rows: Episode, begin: Sequence[int] = ()) -> None:
        """Go on with the rows that ask for a reply, as they are with it. begin: the given tokens that it begins with.

        InputError for another number of rows.
        """
        assert self.chat is not None
        if len(rows) != self.one.asking:
            raise InputError(
                f"{self.one.asking} replies are asked for at once, but episodes of this method have one at a time: "
                "choose another method, or let the agent make its calls one after the other"
            )
        self.past.append(replace(self, seats=[one.copy() for one in self.seats], past=[]))
        self.one.states += [
            repr([dict(message) for message in messages]) if self.seen.state is None else self.seen.state
            for messages in self.seen.conversations
        ]
        replies = [self.one.take(self.chat, row, begin, place - len(rows)) for place, row in enumerate(rows)]
        self.reply = replies if self.seen.also else replies[0]

    async def hear(self) -> None:
        """The environment's answer to the reply that was drawn last."""
        assert self.world is not None
        asked = self.one.asking
        try:
            seen = await observe(self.tools, self.world.step, self.reply, name=f"{self.number}/{self.turn}")
            self.seen = seen
            self.one.rewards += [0.0] * (asked - 1)  # that of the turn is of the last of its replies
            self.one.note(seen)
            self.over = seen.done or seen.truncated or any(row.truncated for row in self.one.rows[-asked:])
            if not self.over:
                self.player = player_of(seen, len(self.seats))
            # Messages that begin the conversation of the player, or are all of it, are not what it got.
            if self.one.asked and not seen.whole:
                self.one.said += seen.messages
            if not self.over:
                self.over = not await self._goes_on()
                self.seen = replace(seen, truncated=self.over)
        except (EnvironmentFailed, InputError) as error:
            failed(self.one, self.task, self.number, "in step, where its episode ends", error)
            self.seen, self.over = Observation(truncated=True), True
        self.turn, self.reply = self.turn + 1, None

    async def _goes_on(self) -> bool:
        """Tell the player who is to reply what the environment said. Returns whether the limits leave it a reply."""
        one, limits = self.one, self.settings.limits
        assert self.chat is not None
        if not one.asked:
            await self.begin()
            return True
        asked, greedy = self.seen.conversations, self.settings.greedy
        if one.replies + len(asked) > limits.turns:
            return False
        if self.seen.whole:
            return await go_on(one, self.tools, self.chat, asked, self.task, limits, greedy)
        return await one.go_on(self.tools, self.chat, self.seen.messages, self.task, limits, greedy)

    async def begin(self) -> None:
        """Begin the conversation of the player who is to reply. InputError where there is nothing to reply to."""
        assert self.chat is not None
        one, limits, asked = self.one, self.settings.limits, self.seen.conversations
        before = [] if self.seen.whole else messages_of(self.task.row, self.settings.system)
        one.begin(self.tools, self.chat, [*before, *asked[0]], self.task, limits)
        if not self.seen.whole:
            return
        if len(asked) > limits.turns:
            raise InputError(
                f"{len(asked)} replies are asked for at once, but an episode has {limits.turns}: give more turns"
            )
        one.nodes.append(BranchPoint(one.asked, one.rows[0].sample, 0, True))
        if asked[1:] and not await go_on(one, self.tools, self.chat, asked[1:], self.task, limits, open_rows=1):
            raise InputError(f"the {len(asked)} conversations that ask for a reply at once leave no room for one each")

    async def close(self) -> None:
        """End the environment, and give the conversations its final rewards.

        A player who never replied is not scored, and an episode that is cut off is so for all.
        """
        if self.world is None:
            return
        cut = self.seen.truncated or any(one.rows[-1].truncated for one in self.seats)
        for one in self.seats:
            one.rewards += [0.0] * (len(one.states) - len(one.rewards))
            one.rows[-1] = replace(one.rows[-1], truncated=cut)
            one.scored = one.replies > 0
        try:
            finals = await final_rewards(self.tools, self.world, len(self.seats), name=f"{self.number}/close")
            for one, final in zip(self.seats, finals, strict=True):
                one.final = final
        except EnvironmentFailed as error:
            if not any(FAILED_ENVIRONMENT in one.info for one in self.seats):
                failed(self.seats[0], self.task, self.number, "in close, so that its episode is not scored", error)
                for one in self.seats:
                    one.scored = False


async def begun(tools: Tools, task: Task, number: int, settings: AgentSettings) -> Path:
    """An episode before its first turn; over, and not scored, if its environment cannot begin."""
    players, stride = settings.players, settings.players * task.samples
    samples = [number + player * task.samples for player in range(players)]
    seats = [Conversation([Episode(task.prompt, task.prompt_id, sample)], stride) for sample in samples]
    path = Path(tools, task, settings, number, seats)
    try:
        path.world, path.seen = await world_of(tools, task, number, settings.environment)
        path.chat = settings.chat(tools.tokenizer, task.row, path.world.tools)
        path.player = player_of(path.seen, players)
        await path.begin()
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
    path.one.info |= {**path.seen.info, **fresh}
    for one in seats:
        one.world = path.world
    return path


async def played(path: Path) -> Path:
    """The episode, played to its end and closed."""
    while not path.over:
        await path.take_turn()
    await path.close()
    return path


async def converse(tools: Tools, task: Task, number: int, settings: AgentSettings) -> Path:
    """A whole episode of the task's group."""
    return await played(await begun(tools, task, number, settings))


def player_of(seen: Observation, players: int) -> int:
    """Who is to reply. EnvironmentFailed for a player who does not play."""
    if players > 1 and not 0 <= seen.player < players:
        raise EnvironmentFailed(f"it is the turn of player {shown(seen.player)}, but {players} play, numbered from 0")
    return seen.player if players > 1 else 0
