"""`Algorithm`: a method as one value."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.algorithms.equations import markdown
from jaxrl_llm.expressions import layout
from jaxrl_llm.part_checks import expect
from jaxrl_llm.rollouts.rules import DynamicSampling, Partial
from jaxrl_llm.transform import Objective, Transform


@dataclass(frozen=True, repr=False)
class Algorithm:
    """A `transform` from rewards to advantages, an `objective` from advantages to a loss, and rules for rollouts.

    `needs` names what the loop must provide beyond a sampled and scored batch. A `strategy` requests partial rollouts;
    the run's settings override it. Its repr is the code that composes it; a notebook shows its equations too. Raises
    InputError for a part of another type, such as a factory that was not called.
    """

    transform: Transform
    objective: Objective
    curriculum: DynamicSampling | None = None
    strategy: Partial | None = None

    def __post_init__(self) -> None:
        expect("an algorithm's transform", self.transform, Transform)
        expect("an algorithm's objective", self.objective, Objective)
        if self.curriculum is not None:
            expect("an algorithm's curriculum", self.curriculum, DynamicSampling)
        if self.strategy is not None:
            expect("an algorithm's strategy", self.strategy, Partial)

    @property
    def needs(self) -> frozenset[str]:
        """What must be computed or provided beyond a scored batch, names of `jaxrl_llm.needs`."""
        return self.transform.needs | self.objective.needs

    __repr__ = layout

    def _repr_markdown_(self) -> str:
        """For notebooks: the equations in LaTeX, and the code."""
        return markdown(self)
