"""Rollouts that fork where a second token is nearly as likely, and drop branches that go on like their parent."""

from asyncio import gather
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import Fraction, NonNegativeInt
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.trees import by_prefix, grow
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.utils.errors import InputError, shown


class _Fork(NamedTuple):
    """A place where a branch may begin."""

    place: int
    order: int  # of the branch that it leaves
    branch: Episode
    token: Tokens  # that the new branch begins with


@part
def near_ties(
    absolute: Fraction = 0.25,
    relative: Fraction = 0.15,
    windows: Sequence[int] = (20, 30, 50),
    edit: Fraction | None = 0.4,
    suffix: Fraction | None = None,
    overlap: Fraction | None = None,
    until: NonNegativeInt = 512,
    share_steps: Sequence[int] = (0, 10, 20, 80, 200),
    shares: Sequence[float] = (1.0, 0.75, 0.5, 0.25, 0.0),
    greedy: bool = False,
) -> Rollout:
    """`task.samples` completions, a share of them a tree that forks at near ties; the others are independent samples.

    A branch begins where the two most probable tokens both have a probability above `absolute`, with a difference of
    less than `relative`, among the first `until` tokens. Its first token is the more probable one of the two that its
    parent does not have there, with the log-probability that it was ranked by, as if it had been drawn. The branch is
    dropped if, a window of r tokens later, it is still like its parent at the same places: edit distance / r below
    `edit`, the longest end of one that is in the other / r above `suffix`, or their longest common subsequence / r
    above `overlap`; a limit that is None is not applied. Windows in which one of the two ends are skipped. Earlier
    forks come first. The tree has at most shares[i] of the group from training step share_steps[i] on. greedy: where no
    branch begins, the first `until` tokens of the tree are the most probable ones; all probabilities there, also those
    that tokens have in the batch, are then at temperature 1 and without truncation. Provides node.
    """
    if not windows or list(windows) != sorted(set(windows)) or windows[0] < 1:
        raise InputError(f"windows are {shown(windows)}, but must be ascending numbers of tokens, at least 1")
    if not shares or len(shares) != len(share_steps) or list(share_steps) != sorted(set(share_steps)):
        raise InputError(f"share_steps {shown(share_steps)} must ascend, with one of the shares {shown(shares)} each")

    def alike(branch: Episode, parent: Episode, place: int) -> bool:
        a, b = branch.own.token[place:].tolist(), parent.own.token[place:].tolist()
        room = min(len(a) - branch.ended, len(b) - parent.ended)  # the token that ends a completion is in no window
        return any(too_similar(a[:r], b[:r], edit, suffix, overlap) for r in windows if r <= room)

    def forks(branch: Episode, start: int, order: int) -> list[_Fork]:
        """The near ties of a branch from token `start` on, each with the more probable token that it does not have."""
        own = branch.own
        if not own.size:
            return []
        ids, logp, untruncated = own.most_probable.swapaxes(0, 1)
        p, allowed = np.exp(untruncated), np.isfinite(logp[:, 1])  # top-k and the like may allow no second token
        places = np.flatnonzero(allowed & (p[:, 1] > absolute) & (p[:, 0] - p[:, 1] < relative)).tolist()
        inside = [place for place in places if start <= place < until]
        return [_Fork(t, order, branch, own.instead(t, int(own.token[t] == ids[t, 0]))) for t in inside]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        numbers = count(1)

        async def on(episode: Episode, pause_at: int | None = None, **begins: Any) -> Episode:
            """`grow` within the tree."""
            stop = None if pause_at is None else episode.size + pause_at
            trunk = until if stop is None else min(stop, until)
            if greedy and episode.size < trunk:
                pause = trunk - episode.size
                episode, begins = await grow(tools, task, episode, pause_at=pause, greedy=True, **begins), {}
            if stop is not None and episode.size >= stop:
                return episode
            return await grow(tools, task, episode, pause_at=None if stop is None else stop - episode.size, **begins)

        root = await on(Episode(task.prompt, task.prompt_id))
        step = int(root.own.policy_step[0]) if root.size else 0
        started = [share for first, share in zip(share_steps, shares, strict=True) if first <= step]
        wanted = min(task.samples, round((started[-1] if started else 0.0) * task.samples))

        async def look(fork: _Fork, number: int) -> Episode | None:
            """The whole branch, unless it goes on like its parent."""
            start = fork.branch.first(fork.place)
            branch = await on(start, windows[-1], number=number, begun=fork.token)
            return None if alike(branch, fork.branch, fork.place) else await on(branch)

        kept, waiting = [root], forks(root, 0, 0)
        while waiting and len(kept) < wanted:  # as many at once as there is room for; some may be dropped
            room = wanted - len(kept)
            chosen, waiting = waiting[:room], waiting[room:]
            found = await gather(*(look(fork, next(numbers)) for fork in chosen))
            for branch, fork in zip(found, chosen, strict=True):
                if branch is not None:
                    waiting += forks(branch, fork.place + 1, len(kept))
                    kept.append(branch)
            waiting.sort(key=lambda fork: (fork.place, fork.order))
        others = range(task.samples - len(kept))
        prompt = Episode(task.prompt, task.prompt_id)
        independent = await gather(*(grow(tools, task, prompt, number=next(numbers)) for _ in others))
        return by_prefix([*kept, *independent])

    return Rollout(program, "near_ties", frozenset({"node"}), demands=Demands(ranked=2))


def too_similar(
    a: Sequence[int], b: Sequence[int], edit: float | None, suffix: float | None, overlap: float | None
) -> bool:
    """Whether two windows of equal length are too similar, see `near_ties`.

    >>> too_similar([1, 2, 3, 4, 5], [9, 2, 3, 4, 5], 0.4, None, None)
    True
    """
    size = len(a)
    return (
        (edit is not None and edit_distance(a, b) / size < edit)
        or (suffix is not None and max(longest_end(a, b), longest_end(b, a)) / size > suffix)
        or (overlap is not None and common_subsequence(a, b) / size > overlap)
    )


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Least number of tokens to insert, delete or replace that makes one of the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


def longest_end(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest end of `a` that occurs somewhere in `b`."""
    best = 0
    for stop in range(1, len(b) + 1):
        size = 0
        while size < min(stop, len(a)) and a[len(a) - 1 - size] == b[stop - 1 - size]:
            size += 1
        best = max(best, size)
    return best


def common_subsequence(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b, start=1):
            corner, row[j] = row[j], corner + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
