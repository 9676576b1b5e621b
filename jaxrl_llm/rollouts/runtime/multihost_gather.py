"""A round of rollouts on several hosts: each unit of them runs its share of the groups, and then all hosts have all.

Units, mostly of one host each, do not wait for each other while they sample, except where a step ends with the first
groups that are complete, then they compare after each chunk of decode steps, and where programs meet.

The programs of an engine on the devices of several hosts of a unit must be started on each of them, in the same order.
Rollout programs, rewards and environments run on the first host only, which tells the others each call before it makes
it (`in_lockstep`). What the engine itself decides follows from the calls and from numbers that all hosts have.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed.hosts import Hosts
from jaxrl_llm.rewards.entries import entries_at
from jaxrl_llm.rewards.entry_arrays import concatenable
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rewards.workers.calling import Logged, all_logged
from jaxrl_llm.rollouts.program_host import Completes, Draws, MakeEngine
from jaxrl_llm.rollouts.runtime.admission import Admit, Admitted, Collected
from jaxrl_llm.rollouts.runtime.external_calls import Meet, Met, Post, meet_here
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.stats import Stats

ADDED = (
    "rows", "prompt_slots", "live", "busy_live", "tokens", "prompts", "prompt_tokens", "padded_tokens", "reused_tokens",
    "compiles", "moved_bytes",
)  # fmt: skip
LONGEST = ("steps", "busy_steps", "first_token", "seconds", "moved_seconds")


class _Part(NamedTuple):
    """What one host found. Its places are those among all groups in flight."""

    found: Collected
    texts: list[str]
    reward: np.ndarray
    rewards: dict[str, np.ndarray]
    failures: dict[str, int]
    entries: Mapping[str, np.ndarray] = {}  # what reward functions gave for the batch's `info`
    token_rewards: np.ndarray | None = None
    logged: Logged = Logged()


def admit_on(hosts: Hosts, places: Sequence[int]) -> Admit:
    """`admit_first` over the groups of all hosts. places: of this host's groups among all in flight."""

    def admit(ended: Sequence[tuple[int, int]], over: bool, wanted: int) -> Admitted:
        found = hosts.gather(([(chunk, places[place]) for chunk, place in ended], over))
        taken = {place for _, place in sorted(one for ended, _ in found for one in ended)[:wanted]}
        own = [number for number, place in enumerate(places) if place in taken]
        return Admitted(own, len(taken), all(over for _, over in found))

    return admit


def meet_on(hosts: Hosts, places: Sequence[int]) -> Meet:
    """A meeting of all hosts, on the first host of a unit. places: of this host's groups among all in flight."""
    if hosts.count == 1:
        return meet_here

    def meet(posts: Sequence[Post], over: bool) -> Met:
        take_part(hosts)
        found = hosts.gather(([(places[place], what) for place, what in posts], over))
        both = sorted((post for some, _ in found for post in some), key=lambda post: post[0])
        at = {place: number for number, (place, _) in enumerate(both)}
        return Met(both, [at[places[place]] for place, _ in posts], all(over for _, over in found))

    return meet


def of_all_hosts(
    hosts: Hosts,
    places: Sequence[int],
    found: Collected,
    scored: Scored | None,
    batch_of: Callable[[Sequence[Group]], Trajectories],
) -> tuple[Collected, Scored]:
    """The groups of all hosts in the order of their places, and their batch with its rewards; the same on every host.

    scored: this host's groups, None where it has none.
    """
    own = found._replace(
        places=[places[i] for i in found.places], left_places=[places[i] for i in found.left_places],
        held={},
    )  # fmt: skip
    parts = hosts.gather(_part(own, scored))
    texts = [text for part in parts for text in part.texts]
    ends = np.cumsum([len(one.episodes) for part in parts for one in part.found.groups])
    groups = [one for part in parts for one in part.found.groups]
    order = np.argsort([place for part in parts for place in part.found.places])
    rows = np.concatenate([np.arange(ends[i] - len(groups[i].episodes), ends[i]) for i in order])
    logs = [log for part in parts for log in part.found.left]
    at = [place for part in parts for place in part.found.left_places]
    merged = Collected(
        [groups[i] for i in order], tuple(logs[i] for i in np.argsort(at)),
        combined_stats([part.found.stats for part in parts]), sorted(p for part in parts for p in part.found.places),
        sorted(at), found.held,
    )  # fmt: skip
    with_groups = [part for part in parts if part.texts]
    names = with_groups[0].rewards
    fields: dict[str, Any] = {
        "rewards": {name: np.concatenate([part.rewards[name] for part in with_groups])[rows] for name in names},
        "reward": np.concatenate([part.reward for part in with_groups])[rows],
    }
    failures = {name: sum(part.failures[name] for part in with_groups) for name in with_groups[0].failures}
    batch = batch_of(merged.groups).replace(**fields)
    if any(part.token_rewards is not None for part in with_groups):
        of_tokens: Any = _widened(with_groups, batch.tokens.shape[1])[rows]
        batch = batch.replace(token_rewards=of_tokens)
    parted = concatenable([(part.entries, len(part.texts)) for part in with_groups])
    entries: Any = {name: np.concatenate([one[name] for one in parted])[rows] for name in parted[0]}
    batch = batch.with_info(**entries) if entries else batch
    logged = all_logged((part.logged, len(part.texts)) for part in parts)
    logged = logged._replace(extras=entries_at(logged.extras, rows.tolist()))
    return merged, Scored(batch, [texts[i] for i in rows], failures, tuple(entries), logged)


def _widened(parts: Sequence[_Part], width: int) -> np.ndarray:
    """The `token_rewards` of all hosts f32[rows, width]; 0 on hosts without."""
    out = []
    for part in parts:
        rewards = np.zeros((len(part.texts), 0), np.float32) if part.token_rewards is None else part.token_rewards
        out.append(np.pad(rewards, ((0, 0), (0, width - rewards.shape[1]))))
    return np.concatenate(out)


def _part(found: Collected, scored: Scored | None) -> _Part:
    if scored is None:
        return _Part(found, [], np.zeros(0, np.float32), {}, {})
    batch = scored.batch
    rewards = {name: np.asarray(x) for name, x in (batch.rewards or {}).items()}
    entries = {name: np.asarray(batch.need(name)) for name in scored.entries}
    reward = np.asarray(batch.need("reward"))
    of_tokens = None if batch.token_rewards is None else np.asarray(batch.token_rewards)
    return _Part(found, scored.texts, reward, rewards, scored.failures, entries, of_tokens, scored.logged)


def combined_stats(runs: Sequence[Sequence[Stats]]) -> list[Stats]:
    """The counts of engines that ran at the same time, one list for each host: added up, or the longest."""
    out = []
    for number in range(max(map(len, runs), default=0)):
        ones = [run[number] for run in runs if len(run) > number]
        values: dict[str, Any] = {name: sum(getattr(one, name) for one in ones) for name in ADDED}
        values |= {name: max(getattr(one, name) for one in ones) for name in LONGEST}
        out.append(dataclasses.replace(Stats(), **values, interrupted=any(one.interrupted for one in ones)))
    return out


class _Own(NamedTuple):
    """What a host calls."""

    make: MakeEngine
    admit: Admit
    engines: dict[int, Completes]


Call = Callable[[_Own], Any]  # picklable


def _make(number: int, requests: list[Request], draws: Draws, stats: Stats, kept: list[int], own: _Own) -> None:
    """kept: engines that are still in use."""
    for other in own.engines.keys() - set(kept):
        del own.engines[other]
    own.engines[number] = own.make(requests, draws, stats)


def _step(number: int, requests: list[Request], chunk: int, own: _Own) -> list[Completion]:
    """requests: submitted since the last step."""
    for request in requests:
        own.engines[number].submit(request)
    return own.engines[number].step(chunk)


def _withdraw(number: int, own: _Own) -> list[Completion]:
    return own.engines[number].withdraw()


def _join(own: _Own) -> None:
    """Take part in an exchange of all hosts, of complete groups or a meeting, without groups of its own."""
    own.admit([], True, 0)


def take_part(hosts: Hosts) -> None:
    """On the first host of a unit, before an exchange of all hosts: the others of the unit take part in it."""
    if hosts.together > 1:
        hosts.gather_in_unit(_join)


class _Led:
    """An engine whose calls the other hosts make too."""

    def __init__(self, number: int, own: _Own, call: Callable[[Call], Any]) -> None:
        self.number, self.own, self.call = number, own, call
        self.count = 0
        self.asked: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.asked) or self.own.engines[self.number].busy

    def submit(self, request: Request) -> int:
        """Queue a request until the next step: an engine that grows for it runs programs."""
        self.asked.append(request)
        self.count += 1
        return self.count - 1

    def step(self, chunk: int) -> list[Completion]:
        asked, self.asked = self.asked, []
        found: list[Completion] = self.call(partial(_step, self.number, asked, chunk))
        return found

    def withdraw(self) -> list[Completion]:
        assert not self.asked  # the driver steps an engine right after it submits
        found: list[Completion] = self.call(partial(_withdraw, self.number))
        return found


def in_lockstep(
    hosts: Hosts, make: MakeEngine, admit: Admit, run: Callable[[MakeEngine, Admit], Collected]
) -> Collected:
    """run(make, admit) on the first host of each unit; the others make its calls, and have collected nothing.

    All hosts must call this, with the same functions but for what `admit` exchanges.
    """
    if hosts.together == 1:
        return run(make, admit)
    own = _Own(make, admit, {})
    if not hosts.leads:
        while (call := hosts.gather_in_unit(None)[0]) is not None:
            call(own)
        return Collected([], (), [], [], [])

    def tell(call: Call) -> Any:
        hosts.gather_in_unit(call)
        return call(own)

    numbers = itertools.count()
    made = WeakValueDictionary[int, _Led]()

    def make_led(requests: Sequence[Request], draws: Draws, stats: Stats, before: object = None) -> Completes:
        assert before is None  # hosts that sample as one do not sample beside updates
        number = next(numbers)
        tell(partial(_make, number, list(requests), draws, stats, sorted(made)))
        made[number] = led = _Led(number, own, tell)
        return led

    def admit_led(ended: Sequence[tuple[int, int]], over: bool, wanted: int) -> Admitted:
        take_part(hosts)
        return admit(ended, over, wanted)

    found = run(make_led, admit_led)
    hosts.gather_in_unit(None)
    return found
