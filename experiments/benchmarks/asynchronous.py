"""Seconds of a step by the bound on staleness: python experiments/benchmarks/asynchronous.py

A simulation of events. The groups in flight, their programs and the rule of admission are those of a run; the engine
and the learner are clocks: a decode step takes `decode + row * live rows` seconds, an update `update` seconds, and new
weights `transfer` seconds, after which the tokens of all rows are computed again at `prefill` seconds each. Each host
samples its share of a step's groups, with a clock of its own, and the learner waits for all. Devices are split between
the two: a share x of them samples, 1 / x times as slowly, and the rest learn. With staleness 0 all devices do both.

The ideal is the larger of sampling alone, with all rows busy, and learning alone. Lengths are those of `rollout_tail`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from rollout_tail import tail_limits

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.asynchronous.sampler import forget_groups, renew
from jaxrl_llm.rollouts.asynchronous.staleness import Ahead, Waiting, adjusted, in_flight, taken
from jaxrl_llm.rollouts.program_host import Draws
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.group_run import GroupRun
from jaxrl_llm.rollouts.runtime.in_flight import InFlight
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog
from jaxrl_llm.rollouts.runtime.sample_numbers import SampleNumbers
from jaxrl_llm.sampling.requests import NO_TOKENS, Completion, Request, Tokens
from jaxrl_llm.sampling.stats import Stats

CHUNK = 64
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


@dataclass(frozen=True)
class Machine:
    """Seconds that things take on all devices, and the rows that are decoded at once."""

    decode: float = 0.02
    row: float = 2e-5
    update: float = 20.0
    transfer: float = 0.2
    prefill: float = 5e-6
    rows: int = 128
    hosts: int = 1

    def split(self, sampling: float) -> Machine:
        """The same with this share of the devices for sampling, and the others for updates."""
        return replace(
            self, decode=self.decode / sampling, row=self.row / sampling, prefill=self.prefill / sampling,
            update=self.update / (1 - sampling),
        )  # fmt: skip

    def seconds(self, live: int) -> float:
        """Of a decode step of so many rows on each host."""
        return self.decode + self.row * live

    def ideal(self, lengths: Sequence[int], steps: int) -> tuple[float, float]:
        """Seconds of a step's sampling with all rows busy, and of its update."""
        tokens = sum(lengths) / steps
        return tokens / (self.rows * self.hosts) * self.seconds(self.rows), self.update


class Clock:
    """An engine that decodes nothing: a token a step in each of its rows, at the seconds of a machine."""

    def __init__(self, sim: Host, requests: Sequence[Request], draws: Draws, stats: Stats) -> None:
        self.sim, self.step_number = sim, sim.version
        self.requests, self.waiting = list[Request](), list[int]()
        self.decoded = 0  # steps until now
        self.rows = dict[int, int]()  # of each row, the steps until now less its tokens
        self.ends = list[tuple[int, int]]()  # heap of the steps at which rows end

    @property
    def busy(self) -> bool:
        return bool(self.rows or self.waiting)

    def submit(self, request: Request) -> int:
        self.requests.append(request)
        self.waiting.append(len(self.requests) - 1)
        return len(self.requests) - 1

    def step(self, chunk: int) -> list[Completion]:
        """Fill rows, and decode until one ends or the chunk is over."""
        machine, sim = self.sim.machine, self.sim
        new = self.waiting[: machine.rows - len(self.rows)]
        del self.waiting[: len(new)]
        self.rows |= {number: self.decoded - self.requests[number].begun.size for number in new}
        for number in new:
            heappush(self.ends, (self.rows[number] + self._length(number), number))
        sim.now += machine.prefill * sum(self.requests[number].begun.size for number in new)
        steps = min(chunk, self.ends[0][0] - self.decoded)
        sim.now += steps * machine.seconds(len(self.rows))
        self.decoded += steps
        done = list[int]()
        while self.ends and self.ends[0][0] <= self.decoded:
            done.append(heappop(self.ends)[1])
        return [self._completion(number, self.decoded - self.rows.pop(number), True) for number in done]

    def withdraw(self) -> list[Completion]:
        running = {number: self.decoded - start for number, start in self.rows.items()}
        left = {**running, **{number: self.requests[number].begun.size for number in self.waiting}}
        self.rows, self.waiting, self.ends = {}, [], []
        return [self._completion(number, size, False) for number, size in left.items()]

    def _length(self, number: int) -> int:
        request = self.requests[number]
        return self.sim.lengths[request.prompt_id * self.sim.samples + request.sample]

    def _completion(self, number: int, size: int, ended: bool) -> Completion:
        request = self.requests[number]
        new, numbers = size - request.begun.size, np.zeros(size - request.begun.size, np.float32)
        ids = np.zeros(new, np.int32)
        tokens = request.begun.followed_by(
            Tokens(ids, numbers, numbers, numbers, numbers, np.full(new, self.step_number, np.int32))
        )
        return Completion(number, tokens if size else NO_TOKENS, ended, request.limit)


class Result(NamedTuple):
    """What a simulated run took."""

    seconds: float  # of a step, without the first steps, which fill the pipeline
    waited: float  # seconds of a step for which the learner waited
    staleness: float  # mean of all tokens, in steps
    oldest: int  # of any group
    taken: list[list[GroupKey]]  # by each step


class Host:
    """A host's sampler: its clock, and its share of the groups in flight.

    groups: that each step takes of it. first, apart: the numbers of its prompts are first, first + apart ...
    longest: tokens of the longest completion.
    """

    def __init__(
        self, machine: Machine, lengths: Sequence[int], samples: int, groups: int, bound: int, first: int, apart: int,
        longest: int,
    ) -> None:  # fmt: skip
        self.machine, self.lengths, self.samples, self.groups, self.bound = machine, lengths, samples, groups, bound
        self.steps, self.prompt, self.apart = len(lengths) // (samples * groups * apart), first, apart
        self.now, self.version, self.entered, self.admitted = 0.0, 0, -1, 0
        self.ahead, self.spare, self.ages = min(bound, 1), 0, list[np.ndarray]()
        self.longest = longest
        self.waiting = dict[GroupKey, tuple[int, GroupRun]]()
        self.run = InFlight(Driver(group(), partial(Clock, self), score, None, chunk=CHUNK), [], Rule(), [], {})
        self.run.open(lambda: False)

    async def until_complete(self, step: int, ready: float) -> tuple[list[GroupKey], float]:
        """Decode until the groups of a step are complete: (their keys, when it is so). ready: when its weights are."""
        complete, looked = None if (keys := self._complete(step)) is None else self.now, (-1, -1)
        while True:
            if self.entered < step and self.now >= ready:
                self._enter(step)
            over = await self.run.advance()
            await self.run.settle()
            if over:  # all that was begun is complete: the sampler waits for the learner
                self.now = max(self.now, ready)
            if (self.entered, len(self.run.ended)) == looked and not over:
                continue
            looked = (self.entered, len(self.run.ended))
            keys = self._complete(step)
            complete = self.now if keys is not None and complete is None else complete
            if keys is not None and complete is not None and self.entered == step:
                return keys, complete

    def take(self, keys: Sequence[GroupKey], step: int) -> None:
        """Take the groups of a step."""
        found = [self.waiting.pop(key)[1] for key in keys]
        forget_groups(self.run, found)
        self.ages += [step - episode.own.policy_step for one in found for episode in one.group().episodes]

    def _enter(self, step: int) -> None:
        """Let the weights of a step come in, and the groups that are admitted with them."""
        self.version = self.entered = step
        renew(self.run, self.run.driver)
        self.spare = len(self.run.ended)
        count = max(in_flight(step, self.ahead, self.groups, self.steps) - len(self.waiting), 0)
        flight = [self._task(self.prompt + i * self.apart, step) for i in range(count)]
        self.prompt += count * self.apart
        for one in self.run.new(flight, [SampleNumbers(0, 1 << 20)] * count, {}):
            self.waiting[one.before.key] = (self.admitted, one)
            self.admitted += 1
            self.run.begin(one)

    def _complete(self, step: int) -> list[GroupKey] | None:
        ended = {id(one): chunk for chunk, one in self.run.ended}
        known = [Waiting(key, place, ended.get(id(one))) for key, (place, one) in self.waiting.items()]
        return taken(known, step, self.bound, self.groups, self.groups)

    def _task(self, number: int, step: int) -> tuple[GroupLog, Task]:
        log = GroupLog((number, 1), number, self.samples, step)
        return log, Task({}, log.prompt, number, self.samples, self.longest)


async def run(machine: Machine, lengths: Sequence[int], samples: int, groups: int, bound: int) -> Result:
    """Simulate all steps. groups: of a step, on all hosts."""
    count, longest = machine.hosts, max(lengths)
    hosts = [Host(machine, lengths, samples, groups // count, bound, first, count, longest) for first in range(count)]
    ready, free, waited, oldest = 0.0, 0.0, 0.0, 0
    chosen, ends, ahead = list[list[GroupKey]](), list[float](), Ahead(min(bound, 1))
    for step in range(hosts[0].steps):
        found = [await host.until_complete(step, ready) for host in hosts]
        start = max(ready, *(complete for _, complete in found))
        if bound and step:
            share = (start - ready) / (start - ready + machine.update)
            ahead = adjusted(ahead, bound, min(host.spare for host in hosts), groups // count, share)
        for host, (keys, _) in zip(hosts, found, strict=True):
            host.take(keys, step)
            host.ahead = ahead.steps
        keys = [key for keys, _ in found for key in keys]
        oldest = max(oldest, *(step - key.first_step for key in keys))
        waited, free = waited + start - free, start + machine.update
        chosen, ends, ready = [*chosen, keys], [*ends, free], free + machine.transfer
    for host in hosts:
        await host.run.cancel()
    first = len(ends) // 4
    seconds = (ends[-1] - ends[first]) / (len(ends) - 1 - first)
    ages = np.concatenate([age for host in hosts for age in host.ages])
    return Result(seconds, waited / len(ends), float(np.mean(ages)), oldest, chosen)


async def score(task: Task, episodes: Sequence[Any]) -> list[Any]:
    """No rewards."""
    return list(episodes)


def simulate(machine: Machine, lengths: Sequence[int], samples: int, groups: int, bound: int) -> Result:
    """The result of a run of len(lengths) / (samples groups) steps."""
    return asyncio.run(run(machine, lengths, samples, groups, bound))


def table(machine: Machine, lengths: Sequence[int], samples: int, groups: int, bounds: Sequence[int]) -> list[str]:
    """A line for each bound, at its best split; with staleness 0 all devices do both."""
    steps = len(lengths) // (samples * groups)
    lines = ["staleness  split  s/step  ideal  share  waited  mean age"]
    for bound in bounds:
        found = []
        for split in SPLITS if bound else (1.0,):
            own = machine.split(split) if bound else machine
            each = own.ideal(lengths, steps)
            ideal = max(each) if bound else sum(each)
            found.append((simulate(own, lengths, samples, groups, bound), split, ideal))
        result, split, ideal = min(found, key=lambda one: one[0].seconds)
        lines.append(
            f"{bound:9d}  {split:5.3f}  {result.seconds:6.1f}  {ideal:5.1f}  {ideal / result.seconds:5.0%}"
            f"  {result.waited:6.1f}  {result.staleness:8.2f}"
        )
    return lines


def main() -> None:
    """Print a table for each number of hosts, whose rows and updates scale with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--groups", type=int, default=16, help="prompts of a step, on each host")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--median", type=float, default=256)
    parser.add_argument("--longest", type=float, default=8.0, help="times the median")
    for name in ("decode", "row", "update", "transfer", "prefill"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Machine, name))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for hosts in args.hosts:
        groups = args.groups * hosts
        machine = Machine(
            args.decode, args.row, args.update, args.transfer, args.prefill, args.groups * args.samples, hosts
        )
        count = groups * args.samples * args.steps
        print(f"{hosts} hosts, {groups} x {args.samples} completions a step")
        for line in table(
            machine, tail_limits(count, args.median, args.longest, args.seed), args.samples, groups, args.bounds
        ):
            print(line, flush=True)


if __name__ == "__main__":
    main()
