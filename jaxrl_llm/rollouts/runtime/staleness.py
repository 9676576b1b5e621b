"""The bound on staleness: how many groups are admitted, and which of them a step takes.

The staleness of a group is the learner's step less the step of the weights with which it was admitted; no token of it
is older. With the weights of step v, and S groups a step, (v + bound + 1) S groups have been admitted in all, which is
AReaL's rule (arXiv 2505.24298). A step s takes the groups that were complete first, but none stays whose staleness
would exceed the bound: of those admitted up to step s - bound, at most S are left, since (s + 1) S were admitted by
then and s S were taken. So every step has S groups, no group is dropped, and a slow one is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.rollouts.runtime.replay_log import GroupKey


class Waiting(NamedTuple):
    """A group that no step has taken."""

    key: GroupKey
    place: int  # in the order in which groups were admitted
    ended: int | None = None  # chunk after which it was complete


def admitted(step: int, bound: int, wanted: int, steps: int) -> int:
    """Groups that are admitted in all once the weights of `step` are in. steps: of the run.

    >>> [admitted(step, bound=2, wanted=4, steps=5) for step in range(5)]
    [12, 16, 20, 20, 20]
    """
    return min(step + bound + 1, steps) * wanted


def taken(waiting: Sequence[Waiting], step: int, bound: int, wanted: int) -> list[GroupKey] | None:
    """The groups that a step takes, in the order in which they were admitted; None: it waits for one.

    >>> old, new, newer = (Waiting(GroupKey(i, i, 0), i, ended) for i, ended in enumerate([None, 7, 5]))
    >>> taken([old, new, newer], step=2, bound=2, wanted=1)
    >>> taken([old, new, newer], step=2, bound=3, wanted=1)
    [GroupKey(prompt_id=2, first_step=2, repeat=0)]
    """
    due = [one for one in waiting if one.key.first_step <= step - bound]
    rest = [(one.ended, one.place, one) for one in waiting if one.ended is not None and one not in due]
    if any(one.ended is None for one in due) or len(due) + len(rest) < wanted:
        return None
    chosen = [*due, *(one for *_, one in sorted(rest))][:wanted]
    return [one.key for one in sorted(chosen, key=lambda one: one.place)]
