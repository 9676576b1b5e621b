"""One conversation as rows of exact tokens: what it got so far, how it goes on, and what it is trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.data.chat.calls import Message, Reply
from jaxrl_llm.data.chat.message_forms import lost_thoughts
from jaxrl_llm.data.chat.messages import has_thought
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.copies import Replayable
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rewards.seen import Talk
from jaxrl_llm.rewards.specs import ENVIRONMENT
from jaxrl_llm.rollouts.agents.branches import BranchPoint, sample_number
from jaxrl_llm.rollouts.agents.compaction import Limits, Summary
from jaxrl_llm.rollouts.agents.messages import conversation_of, merged, with_guidance
from jaxrl_llm.rollouts.agents.metrics import COUNTS
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, checksum, given
from jaxrl_llm.utils.errors import InputError


@dataclass
class Conversation:
    """One episode: its rows, of which the last `asking` wait for a reply, and what the environment said."""

    rows: list[Episode]
    stride: int  # from the sample number of a row to that of the next
    messages: list[Message] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)  # before the first reply
    rewards: list[float] = field(default_factory=list)  # of each turn
    final: float = 0.0  # the reward of the whole
    states: list[str] = field(default_factory=list)  # before each turn
    info: dict[str, float] = field(default_factory=dict)
    reserve: int = 0  # tokens of a row that are for its summary
    replies: int = 0  # to the environment; summaries are none
    scored: bool = True  # whether the environment could give its final reward
    world: Replayable | None = None
    guidance: str = ""  # what the policy alone is told; see `guide`
    snapshot: int | None = None  # place in the league of the policy that replies; None: the one that learns
    said: list[Message] = field(default_factory=list)  # after `asked`, whatever became of it in `messages`
    owners: list[int] = field(default_factory=list)  # of each turn: the sample number of its row
    compacting: int = 0  # how often a function was asked to compact it, whether or not that made it shorter
    asking: int = 1
    nodes: list[BranchPoint] = field(default_factory=list)  # where it can branch; none unless it is told whole
    shared: dict[int, int] = field(default_factory=dict)  # by sample: tokens that a row begins with as another does

    @property
    def talk(self) -> Talk:
        """The conversation for reward functions, with the environment that it was with."""
        world = None if self.world is None else self.world.wrapped
        return Talk([dict(one) for one in self.asked], [dict(one) for one in self.said], world)

    @property
    def number(self) -> int:
        """The number of the episode: the sample number of its first row, the lowest."""
        return min(row.sample for row in self.rows)

    def copy(self, shift: int = 0) -> Conversation:
        """The conversation as it is now, which later turns of this one do not change.

        shift: of the sample numbers of its rows.
        """
        return replace(
            self,
            rows=[replace(row, sample=row.sample + shift) for row in self.rows],
            nodes=[replace(node, sample=node.sample + shift) for node in self.nodes],
            shared={sample + shift: size for sample, size in self.shared.items()},
            owners=[sample + shift for sample in self.owners],
            **{name: copy(getattr(self, name)) for name in ("messages", "rewards", "states", "info", "said")},
        )

    def component(self, turn_rewards: bool) -> float:
        """The component `environment` of the reward: the sum of all, or without those of turns. NaN: not scored."""
        total = self.final + (0.0 if turn_rewards else math.fsum(self.rewards))
        return total if self.scored and math.isfinite(total) else math.nan

    def begin(self, tools: Tools, chat: ChatTurns, messages: Sequence[Message], task: Task, limits: Limits) -> None:
        """Take the first messages as the prompt. InputError where there are none, or they leave no room for a reply."""
        if not messages:
            raise InputError("there is nothing to reply to: neither the row's prompt nor the environment says anything")
        self.asked = merged(messages)
        self.messages, prompt = list(self.asked), tuple(chat.begin(self.asked))
        rows, self.reserve = [replace(self.rows[0], prompt=prompt)], _reserved(chat, limits)
        if not tools.fits(prompt) or self._room(rows, task, limits) < 1:
            budget = "the model's context" if not tools.fits(prompt) else f"context_tokens {limits.context_tokens}"
            raise InputError(f"a prompt of {len(prompt)} tokens leaves no room for a reply: {budget} is too small")
        self.rows = rows

    def room(self, task: Task, limits: Limits, place: int = -1) -> int:
        """Most tokens of the next reply, in the row at this place of `rows`."""
        return self._room(self.rows, task, limits, place)

    def take(self, chat: ChatTurns, row: Episode, begin: Sequence[int] = (), place: int = -1) -> Reply:
        """Go on with the row at a place as it is with a reply. begin: the given tokens that it begins with."""
        self.rows[place] = row
        ids = (*begin, *row.last)
        reply = chat.reading(ids)._replace(
            tokens=len(ids), prompt_tokens=len(row.tokens) - len(ids), truncated=row.truncated
        )
        if self.nodes:
            asked = next(node for node in reversed(self.nodes) if node.sample == row.sample)
            self.messages = [*asked.messages]
            self.nodes.append(BranchPoint([*asked.messages, reply.message], row.sample, row.size, False))
        self.messages.append(reply.message)
        self.said.append(reply.message)
        self.owners.append(row.sample)
        self.replies += 1
        return reply

    def note(self, seen: Observation) -> None:
        """Keep the reward and the numbers of a turn."""
        self.rewards.append(seen.reward)
        for name, value in seen.info.items():
            self.info[name] = self.info.get(name, 0.0) + float(value)

    async def go_on(
        self, tools: Tools, chat: ChatTurns, seen: Sequence[Message], task: Task, limits: Limits, greedy: bool = False,
        anew: bool = False,
    ) -> bool:  # fmt: skip
        """Append an observation to the last row, or begin a new row. Returns whether there is room for a reply.

        A new row begins where the template does not append, and where the budget of the context is near, so that the
        next reply may not fit: then with what `Limits.compact` leaves of the conversation. It stays as it is where that
        is not shorter. anew: the messages are a whole conversation, the prompt of a new row.
        """
        if not seen:
            raise InputError("the environment says nothing, though the episode is not over: give messages, or be done")
        fresh = limits.fresh or anew
        everything = merged(seen) if fresh else [*self.messages, *seen]
        longer = self._longer(chat, seen, everything, fresh)
        moved = len(longer) > len(self.rows) and not limits.fresh
        if self._context_left(longer[-1], limits) < _reply_tokens(task, limits):  # another reply may not fit
            shorter = await self._compacted(tools, chat, seen, everything, len(longer[-1].tokens), task, limits, greedy)
            if shorter is not None:
                everything, longer, moved = *shorter, False
                self.info["compactions"] = self.info.get("compactions", 0.0) + 1.0
        self.messages = everything
        if not tools.fits(longer[-1].tokens) or self._room(longer, task, limits) < 1:
            return False
        self.rows, self.info["new_rows"] = longer, self.info.get("new_rows", 0.0) + moved
        return True

    def guide(
        self, tools: Tools, chat: ChatTurns, seen: Sequence[Message], text: str, task: Task, limits: Limits
    ) -> bool:
        """Tell the policy a text with the observation that it answers next, and with the prompts of rows to come.

        seen: messages of that observation. Such rows are trained on under prompts without the text; of a row that has
        replies before it, the last segment has the text, and is the caller's to replace (`Episode.with_given`). False,
        and nothing is told, where there is no room for a reply, or the template does not append the longer observation.
        """
        row = self.rows[-1]
        if row.size:
            before = row.first(row.size - row.segments[-1].tokens.size)
            delta = chat.bridge(with_guidance(seen, text), before.last[-1] if before.last else None)
            if delta is None:
                return False
            longer = before + given(delta)
        else:
            longer = replace(row, prompt=tuple(chat.begin(with_guidance(self.messages, text)))).trained_under(
                row.prompt
            )
        rows = [*self.rows[:-1], longer]
        if not tools.fits(longer.tokens) or self._room(rows, task, limits) < 1:
            return False
        self.rows, self.guidance = rows, text
        return True

    def _context_left(self, row: Episode, limits: Limits) -> int:
        """Tokens that the budget of the context leaves after a row, but for its summary."""
        return 2**30 if limits.context_tokens is None else limits.context_tokens - len(row.tokens) - self.reserve

    def _room(self, rows: Sequence[Episode], task: Task, limits: Limits, place: int = -1) -> int:
        left = self._left(rows, limits) // self.asking  # of what is left of the episode, each reply has its share
        return min(_reply_tokens(task, limits), left, self._context_left(rows[place], limits))

    def _left(self, rows: Sequence[Episode], limits: Limits) -> int:
        taken = sum(row.size - self.shared.get(row.sample, 0) for row in rows)
        return 2**30 if limits.episode_tokens is None else limits.episode_tokens - taken

    def _longer(
        self, chat: ChatTurns, seen: Sequence[Message], everything: Sequence[Message], fresh: bool = False
    ) -> list[Episode]:
        """The rows with an observation. everything: the whole conversation with it, the prompt of a new row."""
        row = self.rows[-1]
        # Whether the template leaves out thoughts now, that it wrote until here, and shall.
        may_lose = not fresh and chat.format.thoughts != "keep" and any(map(has_thought, self.messages))
        rewrites = may_lose and lost_thoughts(chat, everything) > lost_thoughts(chat, self.messages)
        delta = None if fresh or rewrites else chat.bridge(seen, row.last[-1] if row.last else None)
        if delta is None:
            return self._and_new(chat, everything)
        return [*self.rows[:-1], row + given(delta)]

    def _and_new(self, chat: ChatTurns, messages: Sequence[Message]) -> list[Episode]:
        row = self.rows[-1]
        prompt = tuple(chat.begin(messages))
        new = Episode(prompt, row.prompt_id, sample_number(self, prompt) if self.nodes else row.sample + self.stride)
        if self.guidance:
            new = replace(new, prompt=tuple(chat.begin(with_guidance(messages, self.guidance)))).trained_under(
                new.prompt
            )
        return [*self.rows, new]

    async def _compacted(
        self, tools: Tools, chat: ChatTurns, seen: Sequence[Message], everything: Sequence[Message], size: int,
        task: Task, limits: Limits, greedy: bool,
    ) -> tuple[list[Message], list[Episode]] | None:  # fmt: skip
        """The compacted conversation, and the rows with a new one for it; None if that is not below `size` tokens.

        A summary is sampled at the end of the last row, before the observation, whose turns it continues.
        """
        compact = limits.compact
        if compact is None:
            return None
        if not isinstance(compact, Summary):
            name, self.compacting = f"{self.number}/compaction {self.compacting}", self.compacting + 1
            found = await tools.call(compact, [dict(one) for one in everything], name=name, failing=True)
            kept = merged(conversation_of(found))
            rows = self._and_new(chat, kept)
            return (kept, rows) if len(rows[-1].prompt) < size else None
        said = everything[len(self.asked) :]
        kept = merged(compact.messages(self.asked, said, ""))
        if len(chat.begin(kept)) + compact.tokens >= size:
            return None
        ask: list[Message] = [{"role": "user", "content": compact.ask}]
        asked = self._longer(chat, ask, merged([*self.messages, *ask]))
        assert limits.context_tokens is not None
        room = min(compact.tokens, self._left(asked, limits), limits.context_tokens - len(asked[-1].tokens))
        if not tools.fits(asked[-1].tokens) or room < 1:
            return None
        row = await tools.sample(asked[-1], limit=room, greedy=greedy, snapshot=self.snapshot)
        self.rows = [*asked[:-1], replace(row, truncated=False)]  # a summary that was cut goes on all the same
        self.states.append(f"a summary after {self.states[-1]}")
        self.owners.append(row.sample)
        self.rewards.append(0.0)
        kept = merged(compact.messages(self.asked, said, str(chat.reading(row.last).message["content"]).strip()))
        return kept, self._and_new(chat, kept)


def _reply_tokens(task: Task, limits: Limits) -> int:
    return task.limit if limits.turn_tokens is None else limits.turn_tokens


def _reserved(chat: ChatTurns, limits: Limits) -> int:
    """Tokens at the end of a row that a summary and its question need."""
    if not isinstance(limits.compact, Summary):
        return 0
    bridge = chat.bridge([{"role": "user", "content": limits.compact.ask}], None)
    return limits.compact.tokens + len(chat.encode(limits.compact.ask) if bridge is None else bridge)


def finished(one: Conversation, end: Episode, turn_rewards: bool) -> list[Episode]:
    """The rows of an episode with its reward. end: its last row, scored by the run's reward functions."""
    assert end.reward is not None
    parts = {ENVIRONMENT: one.component(turn_rewards), **end.rewards}
    info = {**dict.fromkeys(COUNTS, 0.0), **one.info, "episode": float(one.number)}
    rows, first = [], 0
    for row in one.rows:
        turns = [turn for turn, sample in enumerate(one.owners) if sample == row.sample]
        own = tuple(one.rewards[turn] for turn in turns) if turn_rewards else ()
        keys = tuple(checksum(np.frombuffer(one.states[turn].encode(), np.uint8)) for turn in turns)
        rows.append(
            replace(row, state_keys=keys, turn_rewards=own)
            .scored(end.reward, parts, end.entries)
            .with_info(**info, first_turn=float(first))
        )
        first += len(turns)
    return rows
