"""The bound on staleness: how many groups are admitted, which of them a step takes, the list of those, and metrics.

The staleness of a group is the learner's step less the step of the weights with which it was admitted; no token of it
is older. With S groups a step, at most (bound + 1) S are in flight with the weights of a step, which is AReaL's rule
(arXiv 2505.24298). A learner that never waits needs no more than 2 S: groups that are complete long before a step takes
them are stale for nothing. The sampler therefore begins one step ahead of the learner, gets further ahead after each
step for which the learner waited, and less far after steps that had groups of another step to spare (`adjusted`). No
group is dropped.

A group that is admitted at step v must be taken by step v + bound, its last. Steps could all take the groups that are
complete first if older ones did not run out of steps: those whose last step is t or earlier must not be more than the
steps until t have room for. A step therefore takes, for each t, at least as many of them as the later steps until t
could not, and waits for these alone. This is the condition for earliest deadlines: where it holds after a step, the
later steps can take each group in time. Before the first step it holds, as do groups that are admitted later: their
last step is the last of all, until which there is room for all that is in flight.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxrl_llm.rollouts.runtime.group_run import GroupRun
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.process import stop_if

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.asynchronous.sampler import Taken

WAIT = 0.02  # share of a step's seconds for which the learner may wait
SPARE = 2  # steps with groups of another to spare, after which the sampler is less far ahead


class Waiting(NamedTuple):
    """A group that no step has taken."""

    key: GroupKey
    place: int  # in the order in which groups were admitted
    ended: int | None = None  # chunk after which it was complete


class Ahead(NamedTuple):
    """How far samplers are ahead of the learner."""

    steps: int = 1  # whose groups are in flight beside an update, from 1 to the bound
    spare: int = 0  # steps in a row until now that had groups of another step to spare


def adjusted(ahead: Ahead, bound: int, complete: int, wanted: int, waited: float) -> Ahead:
    """How far samplers are ahead after a step.

    complete: groups that were complete when the learner asked for those of the step, on the host with the fewest;
    wanted: how many it asked for there. waited: share of the step's seconds for which it waited, from 0 to 1.

    >>> adjusted(Ahead(1), bound=2, complete=3, wanted=4, waited=0.3)
    Ahead(steps=2, spare=0)
    >>> adjusted(Ahead(2, spare=1), bound=2, complete=8, wanted=4, waited=0.0)
    Ahead(steps=1, spare=0)
    """
    if waited > WAIT:
        return Ahead(min(ahead.steps + 1, bound))
    spare = ahead.spare + 1 if complete >= 2 * wanted else 0
    return Ahead(max(ahead.steps - 1, 1)) if spare == SPARE else ahead._replace(spare=spare)


def in_flight(step: int, ahead: int, wanted: int, steps: int) -> int:
    """Groups that no step has taken once the weights of `step` are in. ahead: see `Ahead`. steps: of the run.

    >>> [in_flight(step, ahead=2, wanted=4, steps=5) for step in range(5)]
    [12, 12, 12, 8, 4]
    """
    return min(ahead + 1, steps - step) * wanted


def taken(waiting: Sequence[Waiting], step: int, bound: int, wanted: int, later: int) -> list[GroupKey] | None:
    """The `wanted` groups that a step takes, in the order in which they were admitted; None: it waits for one.

    later: groups that each later step takes.

    >>> old, new, newer = (Waiting(GroupKey(i, i, 0), i, ended) for i, ended in enumerate([None, 7, 5]))
    >>> taken([old, new, newer], step=2, bound=2, wanted=1, later=1)
    >>> taken([old, new, newer], step=2, bound=3, wanted=1, later=1)
    [GroupKey(prompt_id=2, first_step=2, repeat=0)]
    """
    left = sorted(waiting, key=lambda one: (math.inf if one.ended is None else one.ended, one.place))
    chosen = list[Waiting]()
    for last in range(step, step + bound + 1):
        until = [one for one in left if one.key.first_step + bound <= last]
        chosen += until[: max(len(until) - (last - step) * later, 0)]
        places = {one.place for one in chosen}
        left = [one for one in left if one.place not in places]
    chosen = [*chosen, *left][:wanted]
    if len(chosen) < wanted or any(one.ended is None for one in chosen):
        return None
    return [one.key for one in sorted(chosen, key=lambda one: one.place)]


def ages(parts: Sequence[Taken], step: int) -> np.ndarray:
    """The staleness int[tokens], in steps, of each sampled token of the groups that a step has taken.

    Tokens that are trained on but were not drawn, such as those of hints, are no older than their group.
    """
    found = [np.zeros(0, int)]
    for one in parts:
        for log, group in zip(one.logs, one.groups, strict=True):
            for episode in group.episodes:
                drawn = np.maximum(episode.own.policy_step, log.key.first_step)
                found.append(step - drawn[episode.actions])
    return np.concatenate(found)


def staleness_metrics(age: np.ndarray, bound: int) -> dict[str, float]:
    """The share of tokens of each staleness, its mean, and the largest. age: as of `ages`."""
    size = max(age.size, 1)
    return {
        "rollout/staleness": float(age.sum()) / size,
        "rollout/stale_tokens": float(np.sum(age > 0)) / size,
        "rollout/oldest": float(age.max(initial=0)),
        **{f"staleness/{steps}": float(np.sum(age == steps)) / size for steps in range(bound + 1)},
    }


def sampler_metrics(seconds: Sequence[Mapping[str, float]], stats: Sequence[Stats], hosts: int) -> dict[str, float]:
    """Seconds of decoding, and idle at the bound, since the last step: the mean of the hosts; and tokens a second.

    seconds, stats: of all hosts.
    """
    found = {name: sum(one[name] for one in seconds) / hosts for name in ("decoding", "idle")}
    speed = sum(one.tokens for one in stats) / found["decoding"] if found["decoding"] else 0.0
    return {"rollout/tokens_per_second": speed} | {f"sampler/{name}_seconds": x for name, x in found.items()}


LOOK = 0.2  # seconds between two looks for Ctrl-C, and for threads that have ended, while something waits
Choose = Callable[[Sequence[Waiting]], list[GroupKey] | None]


class Waitlist:
    """The groups in flight of a host's samplers, in the order in which they were admitted. For several threads."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._groups: dict[GroupKey, Waiting] = {}
        self._admitted = 0
        self._error: BaseException | None = None

    def admit(self, keys: Iterable[GroupKey]) -> None:
        """Groups come after those there are; of one that is there already, that it is not complete any more."""
        with self._news:
            for key in keys:
                place = self._groups[key].place if key in self._groups else self._admitted
                self._admitted += key not in self._groups
                self._groups[key] = Waiting(key, place)

    def ended(self, ended: Iterable[tuple[GroupRun, int]]) -> None:
        """Groups are complete, each since a chunk of its sampler."""
        self.complete((group.before.key, chunk) for group, chunk in ended)

    def complete(self, ended: Iterable[tuple[GroupKey, int]]) -> None:
        """`ended`, by the keys of groups."""
        with self._news:
            for key, chunk in ended:
                self._groups[key] = self._groups[key]._replace(ended=chunk)
            self._news.notify_all()

    def fail(self, error: BaseException) -> None:
        """No group will be complete any more: whoever waits has this error."""
        with self._news:
            self._error = error
            self._news.notify_all()

    def wait(
        self, choose: Choose, interrupted: Callable[[], bool], meanwhile: Callable[[], object]
    ) -> tuple[list[GroupKey], int]:
        """Wait until `choose` names groups, which are complete: (their keys, how many were complete at first).

        choose: (groups that no step has taken) -> keys, or None to wait. meanwhile: called again and again. Raises
        KeyboardInterrupt after Ctrl-C.
        """
        with self._news:
            complete = sum(one.ended is not None for one in self._groups.values())
        while True:
            with self._news:
                if (keys := choose(list(self._groups.values()))) is not None:
                    for key in keys:
                        del self._groups[key]
                    return keys, complete
                if self._error is not None:
                    raise self._error
                self._news.wait(LOOK)
            stop_if(interrupted())
            meanwhile()
