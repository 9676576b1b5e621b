"""Which groups a step waits for: values that methods and runs choose, and the driver follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import InputError
from jaxrl_llm.trajectory import Trajectories, in_words


@dataclass(frozen=True)
class Partial:
    """When a step's rollout stops, and what becomes of completions that are not done by then.

    oversample: groups in flight, as a multiple (1 or more) of those that a step trains on. The step stops when that
    many groups are complete: the longest completions do not hold up the others (APRIL).
    segment_tokens: where not 0, the step stops instead when each completion in flight has so many new tokens, or is
    done, and trains on the groups that are complete by then, which may be fewer than wanted (UloRL).
    train_unfinished: the step trains on every completion in flight, also on those that are not done, whose newest
    tokens are a window of a longer completion (T-PPO). As many groups are in flight as a step trains on; those with a
    completion that is not done stay, the others make room for new prompts.

    The number in flight, ceil(oversample * wanted), bounds the pool: what it holds comes first, and only the rest is
    new prompts. With segments a group is complete after at most S = ceil(limit / segment_tokens) steps, so that an
    `oversample` of S gives every step from the S-th on all the groups that are wanted.

    Raises InputError for a number out of its range, and for more groups in flight than are trained on where all are.
    """

    oversample: float = 1.0
    segment_tokens: int = 0
    train_unfinished: bool = False

    def __post_init__(self) -> None:
        check_number("oversample", self.oversample, least=1, most=1024)
        check_number("segment_tokens", self.segment_tokens, least=0, most=2**31 - 1, whole=True)
        if self.train_unfinished and self.oversample > 1:
            raise InputError(
                f"oversample is {self.oversample}, but each step trains on all that is in flight, finished or not: "
                "leave it at 1"
            )

    def in_flight(self, wanted: int) -> int:
        """Groups in flight in a step that wants `wanted` complete ones."""
        return math.ceil(self.oversample * wanted - 1e-9)  # 1.1 * 10 is a little more than 11


@dataclass(frozen=True)
class DynamicSampling:
    """Sample more prompts until enough groups are informative, e.g. neither all right nor all wrong (DAPO).

    informative: batch -> bool[N], the same for all rows of a group. After `rounds` batches of prompts, what there is
    is trained on: informative groups first.
    """

    informative: Callable[[Trajectories], jax.Array]
    rounds: int = 10

    def __post_init__(self) -> None:
        if not callable(self.informative):
            raise InputError(
                f"DynamicSampling: informative is {in_words(self.informative)}, but must be a function of a batch"
            )
        check_number("DynamicSampling: rounds", self.rounds, least=1, whole=True)
