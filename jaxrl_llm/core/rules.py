"""Strategies for the groups that a step trains on: partial rollouts and dynamic sampling."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import Count, NonNegativeInt, Range
from jaxrl_llm.core.repr import layout
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.utils.errors import InputError


@dataclass(frozen=True, repr=False)
class Partial:
    """When a step's rollout stops, and what happens to unfinished completions.

    oversample: groups in flight as a multiple (at least 1) of those that a step trains on. The rollout stops when a
    step's groups are complete, so that the longest completions do not delay the others (APRIL). segment_tokens: if not
    0, the rollout stops instead when each completion in flight is done or has this many new tokens, and the step trains
    on the complete groups, which can be fewer than wanted (UloRL). train_unfinished: train on every completion in
    flight. The new tokens of an unfinished one are a window of a longer completion (T-PPO). There are as many groups in
    flight as a step trains on; those with an unfinished completion stay, the others are replaced by new prompts.

    ceil(oversample * wanted) groups are in flight: first those of the pool, then new prompts. With segments a group is
    complete after at most S = ceil(limit / segment_tokens) steps, so with `oversample` S every step from the S-th on
    has as many groups as are wanted.

    Raises InputError for a number out of range, and for `oversample` above 1 with `train_unfinished`.
    """

    oversample: Annotated[float, Range(least=1, most=1024)] = 1.0
    segment_tokens: NonNegativeInt = 0
    train_unfinished: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.train_unfinished and self.oversample > 1:
            raise InputError(
                f"oversample is {self.oversample}, but must be 1 with train_unfinished, because each step trains on "
                "all groups in flight"
            )

    def in_flight(self, wanted: int) -> int:
        """Groups in flight in a step that wants `wanted` complete ones."""
        return math.ceil(self.oversample * wanted - 1e-9)  # 1.1 * 10 is a little more than 11

    __repr__ = layout


@dataclass(frozen=True, repr=False)
class DynamicSampling:
    """Sample more prompts until enough groups are informative, e.g. neither all correct nor all wrong (DAPO).

    informative: batch -> bool[N], the same for all rows of a group. After at most `rounds` batches of prompts, missing
    groups are filled up with uninformative ones.
    """

    informative: Callable[[Trajectories], Array]
    rounds: Count = 10

    def __post_init__(self) -> None:
        check_fields(self)

    __repr__ = layout
