"""A running program of one group: its calls and their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.models.layers.moe import NOT_RECORDED
from jaxrl_llm.rollouts.context import FAILED, Decide, Meeting, NotDeterministicError, OtherAnswerError, Task, Tools
from jaxrl_llm.rollouts.episode import Episode, checksum
from jaxrl_llm.rollouts.runtime.external_calls import OutsideCalls
from jaxrl_llm.rollouts.runtime.replay_log import Answer, Call, GroupLog, Held
from jaxrl_llm.rollouts.runtime.sample_numbers import SampleNumbers
from jaxrl_llm.sampling.requests import Completion, Draws, Request
from jaxrl_llm.sampling.routed_experts import in_order
from jaxrl_llm.utils.errors import InputError, error_line, shown
from jaxrl_llm.utils.threads import contained


class Group(NamedTuple):
    """A group that a step trains on."""

    task: Task
    episodes: list[Episode]
    unfinished: list[bool]  # for each episode, whether it continues in a later step
    failed: bool = False  # its program raised or exceeded a time limit


class DriverRun(Protocol):
    """The driver's interface to a group."""

    driver: Any  # with rollout, tokenizer, context, step, time_limit, controls and score
    outside: OutsideCalls

    def take(self, ticket: Ticket) -> None:
        """Queue a request for tokens."""

    def moved(self) -> None:
        """Note that a program made progress."""


@dataclass
class Ticket:
    """A call of `tools.sample` that waits for its tokens."""

    group: GroupRun
    call: Call
    context: Episode
    until: int  # most tokens after the prompt
    stop: int | None  # tokens after the prompt at which to return to the program; None: at the end
    draws: Draws
    answered: asyncio.Future[Answer]

    def request(self, segment_tokens: int) -> Request:
        """The engine's request, which continues the tokens drawn so far."""
        begun = (self.context + self.group.drawn[self.call].segment).own
        pauses = [] if self.stop is None else [self.stop]
        pauses += [begun.size + segment_tokens] if segment_tokens else []
        return Request(
            self.context.prompt, self.until, self.context.prompt_id, self.group.numbers.of(self.context.sample),
            begun, min(pauses) if pauses else None, self.call.place,
        )  # fmt: skip

    def note(self, completion: Completion) -> bool:
        """Store the tokens drawn, and answer the program if the call is complete. Returns whether it is."""
        tokens = completion.tokens.after(self.call.place)
        answer = Answer(tokens, completion.ended, self._before(completion))
        self.group.drawn[self.call] = answer
        whole = self.is_answered_by(answer)
        if whole and not self.answered.done():
            self.answered.set_result(answer)
        return whole

    def _before(self, completion: Completion) -> np.ndarray | None:
        """The experts of the call's context, where it has tokens whose experts were not recorded yet."""
        if (known := self.group.drawn[self.call]).tokens.size:
            return known.before
        context, prompt = self.context, len(self.context.prompt)
        if (found := context.experts) is not None and not np.any(found[:-1] == NOT_RECORDED):
            return None
        return in_order(prompt, completion.prompt_experts, completion.tokens.first(self.call.place))

    def is_answered_by(self, answer: Answer) -> bool:
        """Whether these tokens complete the call."""
        size = self.call.place + answer.tokens.size
        return answer.ended or size >= self.until or (self.stop is not None and size >= self.stop)


class Waits(NamedTuple):
    """A program that waits for a meeting."""

    name: str
    value: Any  # that it brings
    decide: Decide | None
    met: asyncio.Future[Meeting]


class GroupRun:
    """The `context.ProgramHost` of one group: runs its program and records the answers."""

    def __init__(
        self, run: DriverRun, log: GroupLog, task: Task, numbers: SampleNumbers, held: Held | None = None
    ) -> None:
        self.run, self.task, self.numbers, self.step = run, task, numbers, run.driver.step
        self.before, self.first_step, self.repeat = log, log.first_step, log.repeat
        self.drawn: dict[Call, Answer] = dict(log.drawn)
        self.recorded: dict[str, Any] = dict(log.recorded)
        self.resumed = held.taken() if held is not None and held.recorded == log.recorded else {}
        self.held: dict[str, Any] = dict(self.resumed)
        self.asked: dict[tuple[int, int], Ticket] = {}  # by sample number and place
        self.named: set[str] = set()  # names of the calls made so far
        self.outside = 0  # number of external calls that it waits for
        self.meeting: Waits | None = None  # that it waits for
        self.running: asyncio.Task[Any] | None = None
        self.episodes: list[Episode] | None = None
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether the program ended, or failed."""
        return self.episodes is not None or self.error is not None

    @property
    def sampling(self) -> bool:
        """Whether it waits for tokens."""
        return any(not ticket.answered.done() for ticket in self.asked.values())

    @property
    def at_meeting(self) -> bool:
        """Whether it waits for a meeting, and for nothing else."""
        return self.meeting is not None and not (self.outside or self.sampling)

    def begin(self, ended: Callable[[], None]) -> None:
        """Start the program. `ended` is called when it is over."""
        self.running, self._tell = asyncio.ensure_future(self._program()), ended

    async def _program(self) -> None:
        driver = self.run.driver
        try:
            tools = Tools(self, driver.tokenizer, driver.context, driver.controls, driver.encode)
            found = await contained(driver.rollout.program(tools, self.task))
            episodes = list(found)
            right = len(episodes) > 0 if driver.rollout.demands.variable_size else len(episodes) == self.task.samples
            if not right or not all(isinstance(one, Episode) for one in episodes):
                number = "some" if driver.rollout.demands.variable_size else self.task.samples
                raise InputError(f"a program must return {number} episodes, but returned {len(episodes)}")
            if unused := [name for name in self.before.recorded if name not in self.named]:
                raise self._not_deterministic(f"it did not ask for {unused[0]!r} again")
            if left := [call for call in self.before.drawn if (call.number, call.place) not in self.asked]:
                first = left[0]
                raise self._not_deterministic(f"it did not ask for sample {first.number} at token {first.place} again")
            self.episodes = episodes
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.error = error
        self._tell()

    def fail(self, why: str) -> None:
        """End the program with a TimeoutError."""
        self.error = TimeoutError(f"it {why}")
        if self.running is not None:
            self.running.cancel()
        self._tell()

    def log(self) -> GroupLog:
        """The answers so far."""
        # Sorted, because the log must not depend on the order in which external calls answer.
        drawn, recorded = dict(sorted(self.drawn.items())), dict(sorted(self.recorded.items()))
        return self.before._replace(drawn=drawn, recorded=recorded)

    def holds(self) -> Held:
        """What the program holds for the step that goes on with it."""
        return Held(self.log().recorded, dict(self.held))

    def is_resumed(self, value: Any) -> bool:
        """See `context.ProgramHost`."""
        return any(value is one for one in self.resumed.values())

    def group(self) -> Group:
        """The group's current episodes: those that the program returned, else the longest of each sample."""
        if self.episodes is not None:
            return Group(self.task, self.episodes, [False] * len(self.episodes))
        newest: dict[int, Ticket] = {}
        for ticket in sorted(self.asked.values(), key=lambda ticket: ticket.call.place):
            if ticket.draws.temperature != 0 and not ticket.draws.reference:
                newest[ticket.context.sample] = ticket
        blank = Episode(self.task.prompt, self.task.prompt_id)
        episodes, unfinished = [], []
        for number in sorted(newest)[: self.task.samples]:
            ticket = newest[number]
            answer = self.drawn.get(ticket.call, Answer())
            whole = ticket.is_answered_by(answer)
            episode = ticket.context + answer.segment
            episodes.append(replace(episode, ended=answer.ended, truncated=whole and not answer.ended))
            unfinished.append(not whole and self.error is None)
        missing = self.task.samples - len(episodes)
        return Group(
            self.task, [*episodes, *[blank] * missing], [*unfinished, *[False] * missing], self.error is not None
        )

    async def draw(self, call: Call, context: Episode, until: int, stop: int | None, draws: Draws) -> Answer:
        """See `context.ProgramHost`."""
        if draws.reference and not self.run.driver.rollout.demands.reference:
            raise InputError(
                "the program draws from the reference policy: declare it, Rollout(..., demands=Demands(reference=True))"
            )
        place = (call.number, call.place)
        if place in self.asked:
            raise InputError(
                f"the program asks twice for sample {context.sample} at token {call.place}: pass different numbers"
            )
        known = self.drawn.get(call)
        if known is None and any((old.number, old.place) == place for old in self.before.drawn):
            raise self._not_deterministic(f"sample {context.sample} continues other tokens at token {call.place}")
        ticket = Ticket(self, call, context, until, stop, draws, asyncio.get_running_loop().create_future())
        self.asked[place] = ticket
        if known is not None and ticket.is_answered_by(known):
            ticket.answered.set_result(known)
            return known
        self.drawn.setdefault(call, Answer())
        self.run.take(ticket)
        return await ticket.answered

    async def scores(self, episodes: Sequence[Episode]) -> list[Episode]:
        """See `context.ProgramHost`."""
        name = f"scores of {checksum([token for episode in episodes for token in episode.tokens]):08x}"
        while name in self.named:  # the same episodes, scored again
            name += "'"

        async def score() -> Any:
            scored = await self.run.driver.score(self.task, episodes)
            return [[episode.reward, dict(episode.rewards), dict(episode.entries)] for episode in scored]

        # Reward functions have time limits of their own.
        found = await self._remember(name, score, False, None)
        return [episode.scored(*known) for episode, known in zip(episodes, found, strict=True)]

    async def answer(self, name: str, call: Callable[[], Awaitable[Any]], again: bool, failing: bool) -> Any:
        """See `context.ProgramHost`."""
        return await self._remember(name, call, again, self.run.driver.time_limit, failing)

    async def meet(self, name: str, value: Any, decide: Decide | None) -> Meeting:
        """See `context.ProgramHost`."""
        if not self.run.driver.rollout.demands.meets:
            raise InputError(
                f"the program meets others at {name!r}: declare it, Rollout(..., demands=Demands(meets=True))"
            )
        if self.meeting is not None:
            raise InputError(f"the program waits for {self.meeting.name!r} already: meet at one place at a time")
        self._take_name(name)
        if name not in self.recorded:
            met: asyncio.Future[Meeting] = asyncio.get_running_loop().create_future()
            self.meeting = Waits(name, as_json(name, value), decide, met)
            self.run.moved()
            try:
                self.recorded[name] = list(await met)
            finally:
                self.meeting = None
        return Meeting(*self.recorded[name])

    def _take_name(self, name: str) -> None:
        if name in self.named:
            raise InputError(f"the program calls {name!r} twice: give each call its own name")
        self.named.add(name)

    async def _remember(
        self, name: str, call: Callable[[], Awaitable[Any]], again: bool, limit: float | None, failing: bool = False
    ) -> Any:
        self._take_name(name)
        known = name in self.recorded
        if known and (not again or (failing and _failed(self.recorded[name]))):
            return self.recorded[name]
        self.outside += 1
        try:
            found = as_json(name, await self.run.outside.made(asyncio.wait_for(call(), limit), known))
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
            self.outside -= 1
            self.run.moved()
        if known and _differ(found, self.recorded[name]):
            told = f"fails: {found[FAILED]}" if failing and _failed(found) else "returns another answer than before"
            raise self._not_deterministic(f"{name!r} {told}", OtherAnswerError)
        self.recorded[name] = found
        return found

    def _not_deterministic(
        self, what: str, kind: type[NotDeterministicError] = NotDeterministicError
    ) -> NotDeterministicError:
        return kind(
            f"the rollout {self.run.driver.rollout.name} is not deterministic: when rerun from its log on prompt "
            f"{self.task.prompt_id}, {what}"
        )


def _failed(answer: Any) -> bool:
    """Whether this is the answer of a call that failed."""
    return isinstance(answer, dict) and set(answer) == {FAILED}


def _differ(one: Any, other: Any) -> bool:
    """Whether two JSON values differ; NaN is equal to itself."""
    return one != other and json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True)


def as_json(name: str, value: Any) -> Any:
    """A value as a checkpoint restores it; InputError for one that JSON cannot represent."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise InputError(
            f"{name!r} returns {shown(value)}, which JSON cannot represent: return numbers, strings, lists or dicts"
        ) from None
