"""`Algorithm`: one value that names every choice a method makes."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.transform import Objective, Transform


@dataclass(frozen=True)
class Algorithm:
    """How rewards become advantages (`transform`) and advantages a loss (`objective`).

    What the loop must provide beyond a sampled and scored batch is in `needs`.
    """

    transform: Transform
    objective: Objective

    @property
    def needs(self) -> frozenset[str]:
        """Batch fields that the loop must fill in, e.g. "reference_logp"."""
        return self.objective.needs
