"""A running program of one group: its calls and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.models.layers.moe import NOT_RECORDED
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import Draws, NotDeterministicError
from jaxrl_llm.rollouts.runtime.external_calls import Waits
from jaxrl_llm.rollouts.runtime.replay_log import CallKey, GroupLog, Held, PartialSample
from jaxrl_llm.rollouts.runtime.sample_numbers import SampleNumbers
from jaxrl_llm.sampling.requests import NO_TOKENS, Completion, Request, Tokens
from jaxrl_llm.sampling.routed_experts import in_order
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.threads import contained

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.runtime.in_flight import InFlight


class Group(NamedTuple):
    """A group that a step trains on."""

    task: Task
    episodes: list[Episode]
    unfinished: list[bool]  # for each episode, whether it continues in a later step
    failed: bool = False  # its program raised or exceeded a time limit


@dataclass
class Ticket:
    """A call of `tools.sample` that waits for its tokens."""

    group: GroupRun
    call: CallKey
    context: Episode
    until: int  # most tokens after the prompt
    stop: int | None  # tokens after the prompt at which to return to the program; None: at the end
    draws: Draws
    answered: asyncio.Future[PartialSample]
    fixed: tuple[int, ...] = ()  # see `Request`

    def request(self, segment_tokens: int) -> Request:
        """The engine's request, which continues the tokens drawn so far."""
        begun = (self.context + self.group.drawn[self.call].segment).own
        pauses = [] if self.stop is None else [self.stop]
        pauses += [begun.size + segment_tokens] if segment_tokens else []
        return Request(
            self.context.prompt, self.until, self.context.prompt_id, self.group.numbers.of(self.context.sample),
            begun, min(pauses) if pauses else None, self.call.place,
            self.group.member(self.context.sample) if self.draws.trained else 0, self.fixed,
        )  # fmt: skip

    def note(self, completion: Completion) -> bool:
        """Store the tokens drawn, and answer the program if the call is complete. Returns whether it is."""
        tokens = completion.tokens.after(self.call.place)
        answer = PartialSample(tokens, completion.ended, self._before(completion))
        self.group.drawn[self.call] = answer
        whole = self.is_answered_by(answer)
        if whole and not self.answered.done():
            self.answered.set_result(answer)
        return whole

    def _before(self, completion: Completion) -> np.ndarray | None:
        """The experts of the call's context, where it has tokens whose experts were not recorded yet."""
        if (known := self.group.drawn[self.call].before) is not None:
            return known
        context, prompt = self.context, len(self.context.prompt)
        if (found := context.experts) is not None and not np.any(found[:-1] == NOT_RECORDED):
            return None
        return in_order(prompt, completion.prompt_experts, completion.tokens.first(self.call.place))

    def is_answered_by(self, answer: PartialSample) -> bool:
        """Whether these tokens complete the call."""
        size = self.call.place + answer.tokens.size
        return answer.ended or size >= self.until or (self.stop is not None and size >= self.stop)


class GroupRun:
    """Runs the program of one group, to whose `Tools` it belongs, and records the answers."""

    def __init__(
        self, run: InFlight, log: GroupLog, task: Task, numbers: SampleNumbers, held: Held | None = None
    ) -> None:
        self.run, self.task, self.numbers, self.step = run, task, numbers, run.driver.step
        self.before, self.first_step, self.repeat = log, log.first_step, log.repeat
        self.drawn: dict[CallKey, PartialSample] = dict(log.drawn)
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
        rollout = self.run.driver.rollout  # not the driver: a program that is cancelled keeps its frames
        try:
            found = await contained(rollout.program(self._tools(), self.task))
            episodes = list(found)
            right = len(episodes) > 0 if rollout.demands.variable_size else len(episodes) == self.task.samples
            if not right or not all(isinstance(one, Episode) for one in episodes):
                number = "some" if rollout.demands.variable_size else self.task.samples
                raise InputError(f"a program must return {number} episodes, but returned {len(episodes)}")
            if unused := [name for name in self.before.recorded if name not in self.named]:
                raise self.not_deterministic(f"it did not ask for {unused[0]!r} again")
            if left := [call for call in self.before.drawn if (call.number, call.place) not in self.asked]:
                first = left[0]
                raise self.not_deterministic(f"it did not ask for sample {first.number} at token {first.place} again")
            self.episodes = episodes
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.error = error
        self._tell()

    def _tools(self) -> Tools:
        driver = self.run.driver
        return Tools(self, driver.tokenizer, driver.context, driver.controls, driver.encode)

    def fail(self, why: str) -> None:
        """End the program with a TimeoutError."""
        self.error = TimeoutError(f"it {why}")
        if self.running is not None:
            self.running.cancel()
        self._tell()

    def log(self) -> GroupLog:
        # Sorted, because the log must not depend on the order in which external calls answer.
        """The answers so far."""
        drawn, recorded = dict(sorted(self.drawn.items())), dict(sorted(self.recorded.items()))
        return self.before._replace(drawn=drawn, recorded=recorded)

    def member(self, sample: int) -> int:
        """The member of the rollout's population that draws a sample; 0 where there is no population."""
        return 0 if self.run.driver.rollout.population is None else self.numbers.member(sample)

    def group(self) -> Group:
        """The group's current episodes: those that the program returned, else the longest of each sample.

        Of a population, each says which member drew it.
        """
        found, population = self._group(), self.run.driver.rollout.population
        if population is None:
            return found
        seed = float(population.seed_at(self.step))
        marked = [one.with_info(member=self.member(one.sample), member_seed=seed) for one in found.episodes]
        return found._replace(episodes=marked)

    def _group(self) -> Group:
        if self.episodes is not None:
            return Group(self.task, self.episodes, [False] * len(self.episodes))
        newest: dict[int, Ticket] = {}
        for ticket in sorted(self.asked.values(), key=lambda ticket: ticket.call.place):
            if ticket.draws.temperature != 0 and ticket.draws.learns:
                newest[ticket.context.sample] = ticket
        blank = Episode(self.task.prompt, self.task.prompt_id)
        # An agent has the reward of its episode, and may have another turn, until the program returns it.
        later = self.run.driver.rollout.agent is not None
        episodes, unfinished = [], []
        for number in sorted(newest)[: self.task.samples]:
            ticket = newest[number]
            answer = self.drawn.get(ticket.call, PartialSample())
            whole = ticket.is_answered_by(answer)
            episode = ticket.context + answer.segment
            episodes.append(replace(episode, ended=answer.ended, truncated=whole and not answer.ended))
            unfinished.append((later or not whole) and self.error is None)
        missing = self.task.samples - len(episodes)
        return Group(
            self.task, [*episodes, *[blank] * missing], [*unfinished, *[False] * missing], self.error is not None
        )

    async def draw(
        self, call: CallKey, context: Episode, until: int, stop: int | None, draws: Draws, fixed: tuple[int, ...] = (),
        begun: Tokens = NO_TOKENS,
    ) -> PartialSample:  # fmt: skip
        """Tokens of a completion. until: most tokens after the episode's prompt. fixed: see `Request`.

        begun: tokens that it begins with.
        """
        if draws.reference and not self.run.driver.rollout.demands.reference:
            raise InputError(
                "the program draws from the reference policy: declare it, Rollout(..., demands=Demands(reference=True))"
            )
        if draws.snapshot is not None:
            if (league := self.run.driver.rollout.demands.league) is None:
                raise InputError(
                    "the program draws from a snapshot: declare a league, "
                    "Rollout(..., demands=Demands(league=League()))"
                )
            check_number("snapshot", draws.snapshot, least=0, most=league.size - 1, whole=True)
        place = (call.number, call.place)
        if place in self.asked:
            raise InputError(
                f"the program asks twice for sample {context.sample} at token {call.place}: pass different numbers"
            )
        known = self.drawn.get(call)
        if known is None and any((old.number, old.place) == place for old in self.before.drawn):
            raise self.not_deterministic(f"sample {context.sample} continues other tokens at token {call.place}")
        answered: asyncio.Future[PartialSample] = asyncio.get_running_loop().create_future()
        ticket = Ticket(self, call, context, until, stop, draws, answered, fixed)
        self.asked[place] = ticket
        if known is not None and ticket.is_answered_by(known):
            ticket.answered.set_result(known)
            return known
        self.drawn.setdefault(call, PartialSample(begun))
        self.run.take(ticket)
        return await ticket.answered

    def not_deterministic(
        self, what: str, kind: type[NotDeterministicError] = NotDeterministicError
    ) -> NotDeterministicError:
        """The error of a program that deviates from its log."""
        return kind(
            f"the rollout {self.run.driver.rollout.name} is not deterministic: when rerun from its log on prompt "
            f"{self.task.prompt_id}, {what}"
        )
