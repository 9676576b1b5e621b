"""External calls of programs: their answers, which are recorded, and at which decode step these count.

An answer counts a fixed number of decode steps after its call. If it comes earlier, it is held back until then; if it
comes later, decoding waits for it there. So other conversations go on while an environment works, and which requests
are decoded together, and with that every bit of a run, does not depend on how long environments and rewards take.

At meetings the programs of a step wait for each other, and tell each other a value: decisions about one prompt can then
depend on what all others have sampled. A meeting is held when every program waits for it or is over, on all hosts, so
that it does not depend on slots, on hosts or on timing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jaxrl_llm.core.rollout import AHEAD
from jaxrl_llm.rollouts.episode import Episode, checksum
from jaxrl_llm.rollouts.program_host import FAILED, Decide, Meeting, OtherAnswerError
from jaxrl_llm.utils.errors import InputError, error_line, shown

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.runtime.group_run import GroupRun

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    due: int
    released: asyncio.Future[None]
    answered: bool = False


class OutsideCalls:
    """The calls that programs wait for.

    ahead: decode steps after which an answer counts. None: when it comes, if it is noticed, so that nothing waits; then
    tokens are still the same in every run, but not the last bits of their log-probabilities. moved: called when an
    answer comes, or a program gets one.
    """

    def __init__(self, ahead: int | None, moved: Callable[[], None]) -> None:
        self.ahead, self.moved = ahead, moved
        self.clock = 0  # decode steps so far, plus those that were skipped because nothing was left to decode
        self._calls: list[_Call] = []
        self._over = False

    async def made(self, work: Awaitable[T], known: bool = False) -> T:
        """What the work returns or raises, when it counts. known: made again for its state only; it counts at once."""
        due = self.clock + (0 if known or self.ahead is None else self.ahead)
        call = _Call(due, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        try:
            try:
                found = await work
            except Exception:
                await self._held(call)
                raise
            await self._held(call)
            return found
        finally:
            if call in self._calls:  # it was cancelled
                self._calls.remove(call)

    async def _held(self, call: _Call) -> None:
        if self._over:  # a call that was cancelled, whose failure is its answer
            return
        call.answered = True
        self.moved()
        await call.released

    def end(self) -> None:
        """Hold no answer back any more, since the programs are cancelled."""
        self._over = True
        for call in self._calls:
            if not call.released.done():
                call.released.set_result(None)

    @property
    def waits(self) -> bool:
        """Whether a program waits for an answer."""
        return bool(self._calls)

    def steps(self, most: int) -> int:
        """Steps, of at most `most`, until the next answer counts."""
        if not self._calls:
            return most
        return min(most, AHEAD if self.ahead is None else min(call.due for call in self._calls) - self.clock)

    def release(self, idle: bool) -> bool | None:
        """Give programs the answers that count now. idle: nothing is left to decode, so that those of the next step do.

        True if there were some, False if one must be waited for, None if decoding can go on.
        """
        now = [call for call in self._calls if call.answered]
        if self.ahead is not None and self._calls:
            due = min(call.due for call in self._calls)
            if due > self.clock and not idle:
                return None
            self.clock = max(self.clock, due)
            now = [call for call in self._calls if call.due <= self.clock]
            if not all(call.answered for call in now):
                return False
        for call in now:
            self._calls.remove(call)
            call.released.set_result(None)
            self.moved()
        return True if now else False if idle and self._calls else None


async def score_recorded(group: GroupRun, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes with their rewards, which are recorded."""
    name = f"scores of {checksum([token for episode in episodes for token in episode.tokens]):08x}"
    while name in group.named:  # the same episodes, scored again
        name += "'"

    async def score() -> Any:
        scored = await group.run.driver.score(group.task, episodes)
        return [[episode.reward, dict(episode.rewards), dict(episode.entries)] for episode in scored]

    # Reward functions have time limits of their own.
    found = await remembered(group, name, score, False, None)
    return [episode.scored(*known) for episode, known in zip(episodes, found, strict=True)]


async def remembered(
    group: GroupRun,
    name: str,
    call: Callable[[], Awaitable[Any]],
    again: bool,
    limit: float | None,
    failing: bool = False,
) -> Any:
    """The answer of an external call of a program, a JSON value, recorded under its name; see `Tools.call`.

    limit: seconds; None: the call has a limit of its own.
    """
    take_name(group, name)
    known = name in group.recorded
    if known and (not again or (failing and _failed(group.recorded[name]))):
        return group.recorded[name]
    group.outside += 1
    try:
        found = _as_json(name, await group.run.outside.made(asyncio.wait_for(call(), limit), known))
    except TimeoutError as error:
        why = str(error) or f"{name!r} did not answer within {limit} s"
        if not failing:
            raise TimeoutError(why) from None
        found = {FAILED: why}
    except Exception as error:
        if not failing:
            raise
        found = {FAILED: error_line(error).removeprefix("RuntimeError: ")}
    finally:
        group.outside -= 1
        group.run.moved()
    before = group.recorded.get(name)  # of which NaN is equal to itself
    if known and found != before and json.dumps(found, sort_keys=True) != json.dumps(before, sort_keys=True):
        told = f"fails: {found[FAILED]}" if failing and _failed(found) else "returns another answer than before"
        raise group.not_deterministic(f"{name!r} {told}", OtherAnswerError)
    group.recorded[name] = found
    return found


def take_name(group: GroupRun, name: str) -> None:
    """Note that a program uses a name; InputError if it used it before."""
    if name in group.named:
        raise InputError(f"the program calls {name!r} twice: give each call its own name")
    group.named.add(name)


def _failed(answer: Any) -> bool:
    return isinstance(answer, dict) and set(answer) == {FAILED}


def _as_json(name: str, value: Any) -> Any:
    """A value as a checkpoint restores it; InputError for one that JSON cannot represent."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise InputError(
            f"{name!r} returns {shown(value)}, which JSON cannot represent: return numbers, strings, lists or dicts"
        ) from None


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
    values = [value for _, (_, value) in met.posts]
    decision = None
    error: Exception | None = None
    if len(names) > 1:
        error = InputError(f"programs wait for meetings of different names: {', '.join(names)}")
    elif waits and (decide := waits[0][1].decide) is not None:
        try:
            decision = _as_json(names[0], decide(values))
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
        group.meeting = Waits(name, _as_json(name, value), decide, held)
        group.run.moved()
        try:
            group.recorded[name] = list(await held)
        finally:
            group.meeting = None
    return Meeting(*group.recorded[name])
