"""The asynchronous source: groups are sampled in a thread beside the updates, with bounded staleness.

It is the standard source with another way to the groups of a step. The loop that calls it is the same: when it asks for
the batch of a step, the weights of that step go to the sampler with the groups that they admit (`staleness`), and the
batch is of groups that are complete by then.
"""

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.rules import Partial
from jaxrl_llm.core.source import Beside, Source, Step
from jaxrl_llm.distributed.hosts import Hosts
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rewards.streamed import StreamedScores
from jaxrl_llm.rollouts.asynchronous.rule import (
    NEVER,
    Asynchrony,
    StepOrder,
    check_asynchronous,
    of_host,
    turns_of,
    write_order,
)
from jaxrl_llm.rollouts.asynchronous.sampler import Taken
from jaxrl_llm.rollouts.asynchronous.samplers import Flight, InThread, Open, Samplers, Scene, StepInputs, new_groups
from jaxrl_llm.rollouts.asynchronous.staleness import (
    Ahead,
    Waiting,
    Waitlist,
    adjusted,
    ages,
    in_flight,
    sampler_metrics,
    staleness_metrics,
    taken,
)
from jaxrl_llm.rollouts.runtime.admission import Collected
from jaxrl_llm.rollouts.runtime.collate import dataset_rows, mean_metrics, program_metrics, to_batch
from jaxrl_llm.rollouts.runtime.multihost_gather import of_all_hosts
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Pool
from jaxrl_llm.rollouts.runtime.source import continued_groups, experience, score_groups
from jaxrl_llm.rollouts.runtime.source_setup import Experience, ExperienceState
from jaxrl_llm.rollouts.runtime.sources import Resampling, rollout_metrics
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import interruptible
from jaxrl_llm.utils.threads import DISPATCH, BothLocks


def asynchronous(setup: Experience, rule: Asynchrony, samplers: Open = InThread) -> Source:
    """The source of an asynchronous run. See `experience`; `setup.beside` and `setup.partial` are set here.

    samplers: opens those of this host; by default the one in a thread of this process. The source's state is what the
    standard source's is. Samplers begin with the first call of `next`, and again after one of `load` or `init`, from
    the groups in the state's pool. A checkpoint has the logs of all groups that no step has taken, with the tokens
    drawn until then. InputError for what needs all groups of a step in that step.
    """
    check_asynchronous(setup, rule.keep)
    setup = beside_updates(setup, rule)
    beside = _Beside(rule, setup.hosts, samplers)
    source = experience(setup, beside.step)

    def anew(function: Any) -> Any:
        def begin(*arguments: Any) -> Any:
            beside.close()
            return function(*arguments)

        return begin

    def save(state: ExperienceState) -> Any:
        return source.save(beside.with_pool(state))

    return source._replace(
        init=anew(source.init), load=anew(source.load), save=save, beside=Beside(beside.paused, beside.close)
    )


def beside_updates(setup: Experience, rule: Asynchrony) -> Experience:
    """The setup of samplers that go on while the parameters are updated."""
    return dataclasses.replace(setup, beside=True, partial=Partial(oversample=rule.bound + 1.0))


class _Beside:
    """The samplers of a source, once its first step has begun.

    Hosts draw the same prompts, of which each samples its share, with its own clock, and takes as many groups of a step
    as the others. Lists of numbers are by host.
    """

    def __init__(self, rule: Asynchrony, hosts: Hosts, open_samplers: Open) -> None:
        self.rule, self.hosts, self.open_samplers = rule, hosts, open_samplers
        self.samplers: Samplers | None = None
        self.waitlist = Waitlist()
        self.last = 0.0  # when groups were taken
        self.in_flight: list[int] = []
        self.ahead = Ahead()
        self.entries = 0  # of this host's samplers until now
        # The state at the beginning of the last step, the same with its prompts drawn, and what the step has taken.
        self.begun: tuple[ExperienceState, ExperienceState] | None = None
        self.unlearned: Pool = ()
        self.streamed: StreamedScores | None = None
        self.turn = threading.Lock()  # held while the sampler must not run programs
        self.lock = BothLocks(self.turn, DISPATCH)
        if rule.turns:
            self.turn.acquire()

    def step(
        self, setup: Experience, state: ExperienceState, params: Params, key: jax.Array, step: int
    ) -> tuple[Step, ExperienceState]:
        """Let weights and groups come in, and take the groups of a step."""
        rule, hosts, wanted, began = self.rule, setup.hosts, setup.prompts_per_step, self.samplers is None
        each, own = wanted // hosts.units, list[GroupLog]()
        if began:
            # Older groups first, so that each host gets as many of them.
            pool = sorted(state.pool, key=lambda log: log.key.first_step)
            self.in_flight, self.entries = [len(pool[host :: hosts.units]) for host in range(hosts.units)], 0
            self.ahead = Ahead()
            own = hosts.share(pool)
        missing = self._missing(step, each)
        before, (new, state, dropped) = state, new_groups(setup, state, missing, step)
        self.begun, self.unlearned = (before, state), ()
        if began and step and rule.repeat:
            raise InputError("a run that repeats the order of another cannot be resumed: begin it anew")
        if self.samplers is None:
            self.streamed = StreamedScores(setup.rewards, setup.policy.tokenizer)
            self.waitlist, self.last = Waitlist(), time.perf_counter()
            self.samplers = self.open_samplers(Scene(setup, rule, self.streamed, self.lock), self.waitlist)
        with setup.clock("transfer"):
            self._enter(StepInputs(step, key, params, state), [*continued_groups(setup, tuple(own)), *new])
        rounds = None if setup.dynamic_sampling is None else Resampling(setup.dynamic_sampling, wanted)
        counts, parts, runs, stats = [each] * hosts.units, list[Taken](), list[dict[str, float]](), list[Stats]()
        while True:
            parts.append(self._take(setup, counts[hosts.index], step, sum(len(one.logs) for one in parts)))
            found, scored = self._scored(setup, parts[-1], counts, step)
            stats, runs = [*stats, *found.stats], [*runs, program_metrics(found.groups)]
            if rounds is None:
                break
            good = rounds.add(found.groups, scored)
            if not rounds.missing:
                break
            # What a host lacks comes to it with these weights; it takes as many of those that are complete.
            by_host = np.split(~good, np.cumsum(counts)[:-1])
            logs = zip(parts[-1].logs, by_host[hosts.index], strict=True)
            self.unlearned = (*self.unlearned[: -len(parts[-1].logs) or None], *(log for log, bad in logs if not bad))
            counts = [int(bad.sum()) for bad in by_host]
            earlier = [log.prompt_id for log, _ in new]
            more, state, lost = new_groups(setup, state, counts, step, earlier)
            new, dropped, self.begun = [*new, *more], dropped + lost, (before, state)
            self._enter(None, more)
        self.in_flight = [count + came - each for count, came in zip(self.in_flight, missing, strict=True)]
        assert self.samplers is not None
        began |= self.samplers.end_step()
        beside = self._metrics(setup, parts, stats, StepOrder(step, missing, [], [], began))
        metrics = rollout_metrics(stats, dropped) | mean_metrics(runs) | beside
        state = state._replace(pool=())
        return (Step(scored, dataset_rows(found.groups), metrics) if rounds is None else rounds.step(metrics)), state

    def _missing(self, step: int, each: int) -> list[int]:
        """The groups that come in with the weights of a step, by host."""
        if self.rule.repeat:
            of_host(self.rule.repeat, self.hosts.index)  # InputError for an order of fewer hosts
            return self.rule.repeat[step].admitted
        # None where a run goes on that is to have fewer steps than were admitted.
        wanted = in_flight(step, self.ahead.steps, each, self.rule.steps)
        return [max(wanted - count, 0) for count in self.in_flight]

    def _enter(self, given: StepInputs | None, flight: Flight) -> None:
        """Let weights (None: those there are) and groups come in."""
        assert self.samplers is not None
        self.entries += 1
        until: list[int | None] = [None] * self.samplers.count
        if self.rule.repeat:
            each = turns_of(self.rule.repeat, self.hosts.index, self.samplers.count)
            until = [turns[self.entries] if self.entries < len(turns) else NEVER for turns in each]
        self.waitlist.admit(log.key for log, _ in flight)
        self.samplers.enter(given, flight, until)

    def _take(self, setup: Experience, count: int, step: int, earlier: int) -> Taken:
        """So many groups of this host. earlier: that this step took before."""
        samplers = self.samplers
        assert samplers is not None
        wanted = setup.prompts_per_step // setup.hosts.units
        repeated = of_host(self.rule.repeat, setup.hosts.index) if self.rule.repeat else None

        def choose(waiting: Sequence[Waiting]) -> list[GroupKey] | None:
            if repeated is None:
                return taken(waiting, step, self.rule.bound, count, wanted)
            known, keys = {one.key: one.ended for one in waiting}, repeated[step][earlier : earlier + count]
            if [key for key in keys if key not in known] and any(key.first_step == step for key in known):
                raise InputError(
                    "the order to repeat is of a run with other prompts or settings: repeat it with its own"
                )
            return keys if all(known.get(key) is not None for key in keys) else None

        with self.given_turn(), setup.clock("groups"), interruptible() as interrupted:
            asked = time.perf_counter()
            keys, complete = self.waitlist.wait(choose, interrupted, samplers.mend)
            found = samplers.take(keys)
            last, self.last = self.last, time.perf_counter()
        found = found._replace(complete=complete, waited=(self.last - asked) / (self.last - last))
        self.unlearned = (*self.unlearned, *found.logs)
        return found

    def _scored(self, setup: Experience, found: Taken, counts: Sequence[int], step: int) -> tuple[Collected, Scored]:
        """The groups of a round of all hosts, with their batch and its rewards. counts: of each host."""
        assert self.streamed is not None
        hosts, scored = setup.hosts, None
        batch_of = partial(to_batch, sampling=setup.sampling, step=step)
        with self.given_turn(), setup.clock("score"):
            if found.groups:
                scored = score_groups(setup, found.groups, batch_of(found.groups), self.streamed, step)
        first = sum(counts[: hosts.index])
        places = list(range(first, first + len(found.groups)))
        own = Collected(found.groups, (), found.stats, list(range(len(places))), [], {})
        if hosts.count == 1:
            assert scored is not None
            return own, scored
        with setup.clock("wait"):
            return of_all_hosts(hosts, places, own, scored, batch_of)

    def _metrics(
        self, setup: Experience, parts: Sequence[Taken], stats: Sequence[Stats], order: StepOrder
    ) -> dict[str, float]:
        """Metrics of a step of all hosts, whose order is written, and how far their samplers are ahead after it.

        order: of the step, of which what each host did is to come.
        """
        logs = [log for one in parts for log in one.logs]
        of_samplers = zip(*(one.entered for one in parts), strict=True)
        entered = [[turn for turns in each for turn in turns] for each in of_samplers]
        mine = ages(parts, order.step), [one.seconds for one in parts], entered, [log.key for log in logs]
        found = setup.hosts.gather((*mine, parts[0].complete, parts[0].waited))
        if self.rule.record is not None and setup.hosts.first:
            of_all = [turns for one in found for turns in one[2]]
            did = order._replace(entered=of_all, groups=[one[3] for one in found])
            write_order(self.rule.record, did)
        if not order.began:
            each, complete = setup.prompts_per_step // setup.hosts.units, min(one[-2] for one in found)
            # The learner waits for the slowest host, which is another in each step.
            self.ahead = adjusted(self.ahead, self.rule.bound, complete, each, max(one[-1] for one in found))
        age, seconds = np.concatenate([one[0] for one in found]), [some for one in found for some in one[1]]
        metrics = staleness_metrics(age, self.rule.bound) | sampler_metrics(seconds, stats, setup.hosts.units)
        return metrics | {"rollout/pool": float(sum(self.in_flight))}

    def with_pool(self, state: ExperienceState) -> ExperienceState:
        """The state with all groups that were not learned from: also those of a step that was left in the middle."""
        if self.samplers is None or self.begun is None:
            return state
        with self.given_turn():
            pool = self.samplers.logs()
        before, drawn = self.begun
        if state is before:
            state, pool = drawn, (*self.unlearned, *pool)
        return state._replace(pool=tuple(log for logs in self.hosts.gather(pool) for log in logs))

    def close(self) -> None:
        if self.samplers is not None:
            with self.given_turn():
                self.samplers.close()
            self.samplers = None
        if self.streamed is not None:
            self.streamed.close()
            self.streamed = None

    @contextmanager
    def given_turn(self) -> Iterator[None]:
        """Context manager in which the sampler may run programs."""
        if not self.rule.turns:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which the sampler runs no programs."""
        with nullcontext() if self.rule.turns else self.turn:
            yield
