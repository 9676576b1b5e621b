"""Agents that begin again in the middle of a success: of their own group, of an earlier step, or of a teacher.

And an agent's episode again from a step on, with the advice of a reflection on the first attempt.
"""

import json
from asyncio import gather
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import BelowOne
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.agents.conversation import finished
from jaxrl_llm.rollouts.agents.messages import lines_of
from jaxrl_llm.rollouts.agents.metrics import RESTARTED
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, begun, converse, played
from jaxrl_llm.rollouts.agents.program import ends_of, with_episodes
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given

IMITATED = "imitated"
RESTARTS = frozenset({IMITATED, "imitated_score"})
MODEL = "restart"  # a column that a curriculum may give: a `Model` as a dict, or None
NOT_LEARNT = -1.0  # in info["imitated"]


class Model(NamedTuple):
    """A success from which episodes of later steps begin, as JSON values."""

    replies: Sequence[Sequence[int] | str]  # token ids of each, or a text of a teacher
    score: float
    place: int | None = None  # replies that all restarts take over; None: each as `anchors` says
    learnt: int | None = None  # of these, the first so many are imitated; None: all


@part
def restarting(rollout: Rollout, share: BelowOne = 0.5, success: float = 0.0) -> Rollout:
    """A rollout of agents of whose episodes a share begins with turns of a success (ROME, 2512.24873).

    Of n samples n - round(share n), at least one, are episodes as ever. The first with a score (and rewards of turns)
    above `success` is the model. The others begin with its first p turns, p from its last turn back to 1 and then again
    from the last, each in a copy of its environment as it was then, and sample the rest. Where there is no success,
    the row's column "restart" may have one, a `Model` of an earlier step or of a teacher, whose first p replies a fresh
    environment is told; with a place it is the model in any case, and p that place. Where there is none, it has a
    single turn, or the environment cannot be copied, the others are episodes of their own. So is what is left of one
    whose environment ends earlier, or which has no room for a reply of the model.

    info["imitated"] marks the tokens that were taken over: k from the end of the success for those of its k-th last
    turn, -1 where these are not to be imitated, 0 for all others; info["imitated_score"] is its score, 0 without one.
    Provides both. InputError for a rollout without agents.
    """

    async def play(tools: Tools, task: Task, settings: AgentSettings) -> list[Episode]:
        again = min(round(share * task.samples), task.samples - 1)
        numbers = range(task.samples)
        turn_rewards = settings.turn_rewards

        async def fresh(number: int) -> Path:
            return await converse(tools, task, number, settings)

        first = list(await gather(*map(fresh, numbers[: task.samples - again])))
        ends = await ends_of(tools, [path.one for path in first], turn_rewards)
        stored = None if (found_before := task.row.get(MODEL)) is None else Model(**found_before)
        own, score = None, 0.0
        if stored is None or stored.place is None:
            scores = [
                (end.reward or 0.0) + (sum(path.one.rewards) if turn_rewards else 0.0)
                for path, end in zip(first, ends, strict=True)
            ]
            won = ((path, score) for path, score in zip(first, scores, strict=True) if score > success)
            own, score = next(won, (None, 0.0))
        if own is not None:
            stored = None
        score = score if stored is None else stored.score
        length = len(own.past) if own is not None else 0 if stored is None else len(stored.replies)
        places = anchors(length, again)
        if stored is not None and stored.place is not None:
            places = [stored.place or None] * again

        async def restart(number: int, turn: int | None) -> tuple[Path, int]:
            if turn is None:
                return await fresh(number), 0
            if own is None:
                assert stored is not None
                path = await _followed(tools, task, settings, number, stored.replies[:turn])
                taken = len(path.past)
                return await played(path), taken
            path = own.before(turn, number)
            if not await path.has_copy():
                return await fresh(number), 0
            path.one.info = {}  # which counts what happens in its own turns
            return await played(path), turn

        found = await gather(*map(restart, numbers[task.samples - again :], places))
        ends += await ends_of(tools, [path.one for path, _ in found], turn_rewards)
        return [
            row.with_info(
                imitated=_left(row, taken, length, None if stored is None else stored.learnt),
                imitated_score=score if taken else 0.0,
                **{RESTARTED: float(taken > 0)},
            )
            for (path, taken), end in zip([*((path, 0) for path in first), *found], ends, strict=True)
            for row in finished(path.one, end, turn_rewards)
        ]

    return with_episodes(rollout, play, "episodes of agents begin in the middle of a success", "restarting", RESTARTS)


def anchors(turns: int, count: int) -> list[int | None]:
    """The turns at which `count` episodes leave one of so many turns: the last first; None where it has only one.

    >>> anchors(4, 5), anchors(1, 2)
    ([3, 2, 1, 3, 2], [None, None])
    """
    return [turns - 1 - number % (turns - 1) if turns > 1 else None for number in range(count)]


def _left(row: Episode, taken: int, length: int, learnt: int | None = None) -> list[float]:
    """For each token after the prompt: turns of the success from its own to the last, if it was taken over, else 0.

    learnt: the turns of the success that are to be imitated; NOT_LEARNT marks the others that were taken over.
    """
    first: Any = row.info["first_turn"]
    turn = np.where(row.turns >= 0, row.turns + int(first), length)
    left = length - turn if learnt is None else np.where(turn < learnt, length - turn, NOT_LEARNT)
    return np.where(turn < taken, left, 0).astype(float).tolist()


async def _followed(
    tools: Tools, task: Task, settings: AgentSettings, number: int, replies: Sequence[Sequence[int] | str]
) -> Path:
    """A fresh episode after these replies, which its environment was told, or as many as it took.

    Their tokens are actions without log-probabilities. A text ends with the token that ends a reply.
    """
    path = await begun(tools, task, number, settings)
    for reply in replies:
        if path.over:
            break
        assert path.chat is not None
        if isinstance(reply, str):
            end = tools.tokenizer.eos_token_id
            ids = [*tools.encode(reply), *([end] if end in path.chat.ends[0] else [])]
        else:
            ids = [int(token) for token in reply]
        if not ids or len(ids) > path.one.room(task, settings.limits):
            break
        path.take(path.one.rows[-1] + given(ids, tools.step)._replace(sampled=True))
        await path.hear()
    path.one.info = {}  # which counts what happens in its own turns
    return path


PIVOT = "pivot"

OUTCOMES = ("perfect", "improvable", "failed")


class Reflection(NamedTuple):
    """What the policy says of an episode."""

    perfect: bool
    step: int = 0  # of the environment, from which to try again
    suggestion: str = ""


class Guided(NamedTuple):
    """Where an episode has the guidance of its retry."""

    row: int  # the row that has it first; those before have nothing that is trained on
    place: int | None  # of its segments, that with the guidance; None: its prompt
    plain: tuple[int, ...]  # that segment without it


@dataclass
class Attempt:
    """An episode, and what is trained on of it."""

    path: Path
    replies: list[str] = field(default_factory=list)
    pivot: int = 0  # turns that are not trained on
    guided: Guided | None = None  # of a retry
    reflected: bool | None = None  # whether a reflection on it could be read; None: there should be none


def reflection_in(text: str, steps: int) -> Reflection | None:
    """What a reflection on `steps` steps says, from its first { to its last }; None if that cannot be read.

    >>> reflection_in('So: {"outcome": "failed", "step": 1, "suggestion": "Look left."}', 3)
    Reflection(perfect=False, step=1, suggestion='Look left.')
    """
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("outcome") not in OUTCOMES:
        return None
    if found["outcome"] == "perfect":
        return Reflection(True)
    step, suggestion = found.get("step"), found.get("suggestion")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < steps:
        return None
    return Reflection(False, step, suggestion.strip()) if isinstance(suggestion, str) and suggestion.strip() else None


def attempt_transcript(attempt: Attempt, reward: float) -> str:
    """An episode as text: what each step saw and replied, and the reward."""
    path = attempt.path
    lines: list[str] = []
    for step, (before, reply) in enumerate(zip(path.past, attempt.replies, strict=True)):
        seen = before.seen.messages if step else path.one.asked
        lines += [f"Step {step}", *lines_of(seen), f"reply: {reply}"]
    lines += lines_of(path.seen.messages)
    return "\n".join([*lines, f"Reward: {reward:g}"])


async def attempted(tools: Tools, task: Task, number: int, settings: AgentSettings) -> Attempt:
    """One episode of the task's group."""
    attempt = Attempt(await begun(tools, task, number, settings))
    path = attempt.path
    while not path.over:
        await path.draw()
        attempt.replies.append(tools.decode(path.one.rows[-1].last))
        await path.hear()
    await path.close()
    return attempt


async def retried_from(first: Attempt, step: int, number: int, text: str) -> Attempt | None:
    """The episode again from a step on, in an environment that is told the same replies before, and with a guidance.

    None if the environment cannot be copied, or there is no room for the guidance.
    """
    path = first.path.before(step, number)
    one, last = path.one, path.one.rows[-1]
    assert path.chat is not None
    if not one.guide(path.tools, path.chat, path.seen.messages, text, path.task, path.settings.limits):
        return None
    place: int | None = None
    plain: tuple[int, ...] = ()
    if last.size:
        place = len(last.segments) - 1
        plain = tuple(last.segments[-1].tokens.token.tolist())
    if not await path.has_copy():
        return None
    attempt = Attempt(path, pivot=len(one.states), guided=Guided(len(one.rows) - 1, place, plain))
    await played(path)
    return attempt


def trained_rows(attempt: Attempt, end: Episode, told: bool = False) -> list[Episode]:
    """The rows of an episode that are trained on, with its reward. told: with the guidance of a retry, not without."""
    path, at = attempt.path, attempt.guided
    rows = finished(path.one, end, path.settings.turn_rewards)
    if at is not None:
        rows = rows[at.row :]
        if at.place is not None and not told:
            rows[0] = rows[0].with_given(at.place, at.plain)
    if told:
        rows = [replace(row, trained_prompt=None).with_info(off_prompt=0.0) for row in rows]
    marks = {PIVOT: float(attempt.pivot), "guided": float(at is not None)}
    if attempt.reflected is not None:
        marks["reflected"] = float(attempt.reflected)
    return [row.with_info(**{"off_prompt": 0.0, **row.info, **marks}) for row in rows]
