"""Conversations that are told whole, several at a time: which row each goes on with, so that what they share is a tree.

A conversation goes on in the row that has all of it so far. Where that row went on otherwise already, as after calls at
once or where an agent goes back to an earlier message, a new row begins with the same tokens. They are given there:
what was sampled of them is trained on in the row that it was sampled in, and nowhere else. Packing finds what rows have
in common (`learner.prefix_trie`), and so does the sampler's cache.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.rollouts.agents.compaction import Limits
from jaxrl_llm.rollouts.agents.messages import merged, messages_after, same_messages
from jaxrl_llm.rollouts.context import MOST_NUMBERS, Tools
from jaxrl_llm.rollouts.episode import Episode, Segment, checksum, given

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.agents.conversation import Conversation

LAST = 4 * MOST_NUMBERS  # above all sample numbers of rows, which begin where those that a program may give end


@dataclass(frozen=True)
class BranchPoint:
    """A place of a row where a conversation can go on."""

    messages: Sequence[Message]  # the conversation until there
    sample: int  # that of the row
    size: int  # tokens of the row after its prompt
    asks: bool  # whether a reply begins there; else one ended


def sample_number(one: Conversation, context: Sequence[int], more: Sequence[Message] = ()) -> int:
    """The sample number of a new row, which keys its noise, by what is asked alone, and not by when.

    context: the tokens that it begins with. more: what the conversation gets after them. Rows that are asked the same
    have different numbers.
    """
    taken = {row.sample for row in one.rows}
    asked = json.dumps([checksum(context), [dict(message) for message in more]], sort_keys=True, default=str)
    slots = (LAST - MOST_NUMBERS) // one.stride
    slot = zlib.crc32(asked.encode()) % slots
    while (number := MOST_NUMBERS + slot * one.stride + one.number) in taken:
        slot = (slot + 1) % slots
    return number


async def go_on(
    one: Conversation, tools: Tools, chat: ChatTurns, asked: Sequence[Sequence[Message]], task: Task, limits: Limits,
    greedy: bool = False, open_rows: int = 0,
) -> bool:  # fmt: skip
    """Make the last rows those that answer these conversations, in this order. Returns whether all have room for it.

    open_rows: the last rows that ask for a reply already, before those.
    """
    one.asking, fits, known = 1, True, set(one.shared)
    waiting = [row.sample for row in one.rows[len(one.rows) - open_rows :]]
    for told in asked:
        whole = merged(told)
        rest = None if limits.fresh else _turned_to(one, whole)
        new = whole if rest is None else rest
        one.said += new
        fits = not new or await one.go_on(tools, chat, new, task, limits, greedy, anew=rest is None)
        if not fits:
            break
        one.nodes.append(BranchPoint(whole, one.rows[-1].sample, one.rows[-1].size, True))
        waiting.append(one.rows[-1].sample)
    rows = {row.sample: _given(row, one.shared.get(row.sample, 0)) for row in one.rows}
    asking = [rows.pop(sample) for sample in waiting]
    # A branch that was compacted says nothing.
    one.rows, one.asking = [*(row for row in rows.values() if row.last), *asking], max(len(asking), 1)
    fits = fits and all(one.room(task, limits, place) > 0 for place in range(-one.asking, 0))
    if not fits:  # nor does one that will not be answered
        one.rows = [row for row in one.rows if row.last] or one.rows[:1]
    new_ones = sum(row.sample in one.shared and row.sample not in known for row in one.rows)
    one.info["branches"] = one.info.get("branches", 0.0) + new_ones
    return fits


def _given(row: Episode, size: int) -> Episode:
    """The row, whose first tokens after its prompt, so many, are given and not sampled."""
    segments, start = list[Segment](), 0
    for segment in row.segments:
        own = segment.tokens
        if segment.sampled and start < size:
            tokens = given(own.token.tolist()).tokens._replace(policy_step=own.policy_step, experts=own.experts)
            segment = Segment(tokens, False, segment.before)
        segments.append(segment)
        start += own.size
    return replace(row, segments=tuple(segments))


def _turned_to(one: Conversation, whole: Sequence[Message]) -> list[Message] | None:
    """Make the row that a conversation goes on with the last one. Returns what it gets there: nothing where the same
    was asked before; None where no row begins so."""
    rows = {row.sample: row for row in one.rows}
    places = list[tuple[bool, BranchPoint, list[Message]]]()
    for node in one.nodes:
        rest = messages_after(node.messages, whole)
        if node.asks:
            rest = [] if same_messages(node.messages, whole) else None
        if rest is not None:
            places.append((rows[node.sample].size == node.size, node, rest))
    if not places:
        return None
    # The longest, and of equal ones the first that did not go on yet.
    is_tip, node, rest = max(places, key=lambda place: (-len(place[2]), place[0]))
    row = rows.pop(node.sample)
    if is_tip and not node.asks:
        one.rows = [*rows.values(), row]
    else:
        shared = row.first(node.size)
        new = replace(shared, sample=sample_number(one, shared.tokens, rest))
        one.shared[new.sample] = new.size
        one.rows = [*one.rows, new]
    one.messages = [*node.messages]
    return rest
