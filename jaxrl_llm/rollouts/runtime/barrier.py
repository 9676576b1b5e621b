"""Meetings: barriers at which the programs of a step wait for each other, and tell each other a value.

Decisions about one prompt can then depend on what all others of the step have sampled so far. A meeting is held when
every program waits for it or is over, on all hosts, so that it does not depend on slots, on hosts or on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rollouts.context import Meeting
from jaxrl_llm.rollouts.runtime.group_run import GroupRun, as_json
from jaxrl_llm.utils.errors import InputError

Post = tuple[int, tuple[str, Any]]  # place of a group in flight; its meeting, and what it brings


class Met(NamedTuple):
    """A meeting of all hosts."""

    posts: list[Post]  # of all groups that meet, in the order of their places
    own: list[int]  # where the posts of this host's groups are among them
    over: bool  # whether the groups of all hosts are over


Meet = Callable[[Sequence[Post], bool], Met]  # (what the groups here bring, whether they are all over) -> Met


def meet_here(posts: Sequence[Post], over: bool) -> Met:
    """A meeting on one host."""
    return Met(list(posts), list(range(len(posts))), over)


def hold(groups: Sequence[GroupRun], meet: Meet) -> bool:
    """Hold the meeting for which all programs wait that are not over. True where all are over, on all hosts.

    Where they wait for meetings of different names, each of them gets an InputError instead, and where what they decide
    raises, that exception.
    """
    waits = [(place, group.meeting) for place, group in enumerate(groups) if group.meeting is not None]
    met = meet([(place, (one.name, one.value)) for place, one in waits], all(group.over for group in groups))
    names = sorted({name for _, (name, _) in met.posts})
    values, decision = [value for _, (_, value) in met.posts], None
    error: Exception | None = None
    if len(names) > 1:
        error = InputError(f"programs wait for meetings of different names: {', '.join(names)}")
    elif waits and (decide := waits[0][1].decide) is not None:
        try:
            decision = as_json(names[0], decide(values))
        except Exception as raised:
            error = raised
    for (_, one), own in zip(waits, met.own, strict=True):
        if error is None:
            one.met.set_result(Meeting(own, values, decision))
        else:
            one.met.set_exception(error)
    return met.over
