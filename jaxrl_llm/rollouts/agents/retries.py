"""An agent's episode again from a step on, with the advice of a reflection on the first attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.agents.conversation import finished
from jaxrl_llm.rollouts.agents.messages import lines_of
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, begun, played
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode

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


def transcript(attempt: Attempt, reward: float) -> str:
    """An episode as text: what each step saw and replied, and the reward."""
    lines, path = list[str](), attempt.path
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
    place, plain = (len(last.segments) - 1, tuple(last.segments[-1].tokens.token.tolist())) if last.size else (None, ())
    if not await path.has_copy():
        return None
    attempt = Attempt(path, pivot=len(one.states), guided=Guided(len(one.rows) - 1, place, plain))
    await played(path)
    return attempt


def rows_of(attempt: Attempt, end: Episode, told: bool = False) -> list[Episode]:
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
