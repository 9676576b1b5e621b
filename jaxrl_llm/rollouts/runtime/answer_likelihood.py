"""What the learner asks the policy about the turns of episodes: a reference answer after each, observations blanked.

These rollouts sample nothing themselves. They go around the run's own, such as the agents of its environment.
"""

import math
from collections.abc import Callable, Sequence

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import altered, group
from jaxrl_llm.rollouts.trees import common


def around(
    change: Callable[[Tools, Task], Callable[[Episode], Episode]], name: str, need: str, *columns: str
) -> Rollout:
    """A rollout that changes each episode of another, by itself of `rollouts.programs.group`. It provides `need`."""

    def wrapped(inner: Rollout) -> Rollout:
        async def program(tools: Tools, task: Task) -> list[Episode]:
            return list(map(change(tools, task), await inner.program(tools, task)))

        return altered(inner, program, name, {need}, columns, wrapped)

    return wrapped(group())


def blanked(episode: Episode, placeholder: Sequence[int], chat: ChatTurns | None) -> Episode:
    """The episode with info["blanked"], for each token after the prompt its stand-in, or NaN."""
    out, last = list[float](), None
    for segment in episode.segments:
        ids = segment.tokens.token.tolist()
        instead = [math.nan] * len(ids)
        if not segment.sampled and last is not None:
            start, end = content_of(ids, _frames(chat, last))
            own = [*placeholder[: end - start], *[placeholder[-1]] * (end - start - len(placeholder))]
            instead[start:end] = map(float, own)
        last = ids[-1] if segment.sampled and ids else last
        out += instead
    return episode.with_info(blanked=out)


def _frames(chat: ChatTurns | None, last: int) -> list[tuple[list[int], list[int]]]:
    """What the template writes before and after the content of an observation, for each role that it may have."""
    if chat is None:
        return []
    found = []
    for role in ("user", "tool"):
        one, other = (chat.bridge([{"role": role, "content": content}], last) for content in "07")
        if one is not None and other is not None:
            start, end = common(one, other), common(one[::-1], other[::-1])
            found.append((one[:start], one[len(one) - end :]))
    return found


def content_of(ids: Sequence[int], frames: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, int]:
    """Where an observation's content begins and ends: after the longest beginning, and before the longest end, that it
    shares with what a frame has there. All of it without frames, or where nothing would be left.

    >>> content_of([1, 5, 6, 7, 2], [([1, 4], [2]), ([1, 5], [3])])
    (1, 4)
    """
    shared = [(common(ids, before), common(ids[::-1], after[::-1])) for before, after in frames]
    start, end = max(shared, key=sum, default=(0, 0))
    return (start, len(ids) - end) if start + end < len(ids) else (0, len(ids))
