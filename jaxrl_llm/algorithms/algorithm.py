"""`Algorithm`: one value that names every choice a method makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import InputError
from jaxrl_llm.trajectory import Trajectories, in_words
from jaxrl_llm.transform import Objective, Transform, expect

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.partial import Partial


@dataclass(frozen=True)
class Resample:
    """Sample more prompts until enough groups are informative, e.g. neither all right nor all wrong (DAPO).

    informative: batch -> bool[N], the same for all rows of a group. After `rounds` batches of prompts, what there is
    is trained on: informative groups first.
    """

    informative: Callable[[Trajectories], jax.Array]
    rounds: int = 10

    def __post_init__(self) -> None:
        if not callable(self.informative):
            raise InputError(
                f"Resample: informative is {in_words(self.informative)}, but must be a function of a batch"
            )
        check_number("Resample: rounds", self.rounds, least=1, whole=True)


@dataclass(frozen=True)
class Algorithm:
    """How rewards become advantages (`transform`) and advantages a loss (`objective`).

    What the loop must provide beyond a sampled and scored batch is in `needs`. A `strategy` asks it for partial
    rollouts; the run's own settings of them win. Raises InputError for a part of another type, such as a function that
    makes one and was not called.
    """

    transform: Transform
    objective: Objective
    curriculum: Resample | None = None
    strategy: Partial | None = None

    def __post_init__(self) -> None:
        expect("an algorithm's transform", self.transform, Transform)
        expect("an algorithm's objective", self.objective, Objective)
        if self.curriculum is not None:
            expect("an algorithm's curriculum", self.curriculum, Resample)
        if self.strategy is not None:
            from jaxrl_llm.rollouts.partial import Partial

            expect("an algorithm's strategy", self.strategy, Partial)

    @property
    def needs(self) -> frozenset[str]:
        """What the loop must provide, of NEEDS in `algorithms.needs`."""
        return self.transform.needs | self.objective.needs
