"""Meetings: barriers at which the programs of a step wait for each other, and tell each other a value.

Decisions about one prompt can then depend on what all others of the step have sampled so far. A meeting is held when
every program waits for it or is over, on all hosts, so that it does not depend on slots, on hosts or on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.rollouts.program_host import Decide, Meeting
from jaxrl_llm.rollouts.runtime.external_calls import as_json, take_name
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.runtime.group_run import GroupRun

Post = tuple[int, tuple[str, Any]]  # place of a group in flight; its meeting, and what it brings


class Waits(NamedTuple):
    """A program that waits for a meeting."""

    name: str
    value: Any  # that it brings
    decide: Decide | None
    met: asyncio.Future[Meeting]


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


async def meet_others(group: GroupRun, name: str, value: Any, decide: Decide | None) -> Meeting:
    """What the programs of the step bring to a meeting, recorded under its name."""
    if not group.run.driver.rollout.demands.meets:
        raise InputError(f"the program meets others at {name!r}: declare it, Rollout(..., demands=Demands(meets=True))")
    if group.meeting is not None:
        raise InputError(f"the program waits for {group.meeting.name!r} already: meet at one place at a time")
    take_name(group, name)
    if name not in group.recorded:
        held: asyncio.Future[Meeting] = asyncio.get_running_loop().create_future()
        group.meeting = Waits(name, as_json(name, value), decide, held)
        group.run.moved()
        try:
            group.recorded[name] = list(await held)
        finally:
            group.meeting = None
    return Meeting(*group.recorded[name])
