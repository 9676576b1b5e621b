"""Which groups a step waits for, which of them it takes, and what the driver returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, Held, Pool
from jaxrl_llm.sampling.stats import Stats


class Admitted(NamedTuple):
    """The complete groups that a step takes."""

    places: list[int]  # of the groups in flight
    total: int  # of these groups, on all hosts
    over: bool  # whether no group is left that could still complete


# ((chunk, place) of each complete group, whether all groups are over, most groups to take) -> Admitted
Admit = Callable[[Sequence[tuple[int, int]], bool, int], Admitted]


def admit_first(ended: Sequence[tuple[int, int]], over: bool, wanted: int) -> Admitted:
    """The groups that were complete first; those of one chunk of decode steps in the order of their places."""
    places = [place for _, place in sorted(ended)[:wanted]]
    return Admitted(places, len(places), over)


@dataclass(frozen=True)
class Rule:
    """Which groups a step waits for."""

    wanted: int | None = None  # stop when this many groups are complete; None: when all are
    segment_tokens: int = 0  # above 0: pause completions after so many new tokens, and stop when all are done or paused
    train_unfinished: bool = False
    """With segments: train on all groups in flight after one segment. Otherwise train on complete groups only, and if
    there are none, decode another segment."""


class Collected(NamedTuple):
    """The groups that were in flight. `groups` and `left` keep their order."""

    groups: list[Group]  # to train on
    left: Pool  # incomplete groups, to continue in the next step
    stats: list[Stats]  # of each sampling engine, one per segment
    places: list[int]  # of `groups` among those in flight
    left_places: list[int]  # of `left`
    held: Mapping[GroupKey, Held] = MappingProxyType({})  # by the programs of `left`, on this host
