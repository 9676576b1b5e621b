"""`Algorithm`: one value that names every choice a method makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import Objective, Transform

if TYPE_CHECKING:
    from jaxrl_llm.sampling.partial import Partial


@dataclass(frozen=True)
class Resample:
    """Sample more prompts until enough groups are informative, e.g. neither all right nor all wrong (DAPO).

    informative: batch -> bool[N], the same for all rows of a group. After `rounds` batches of prompts, what there is
    is trained on: informative groups first.
    """

    informative: Callable[[Trajectories], jax.Array]
    rounds: int = 10


@dataclass(frozen=True)
class Algorithm:
    """How rewards become advantages (`transform`) and advantages a loss (`objective`).

    What the loop must provide beyond a sampled and scored batch is in `needs`. A `strategy` asks it for partial
    rollouts; the run's own settings of them win.
    """

    transform: Transform
    objective: Objective
    curriculum: Resample | None = None
    strategy: Partial | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What the loop must provide, of NEEDS in `algorithms.needs`."""
        return self.transform.needs | self.objective.needs
