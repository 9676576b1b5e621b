"""What a laboratory runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.in_jax.lab.grid import Grid
from jaxrl_llm.in_jax.settings import LabSettings

# Sizes of tasks, and supervised steps before reinforcement learning, after which the policy earns a part of the reward.
OPTIONS: dict[str, dict[str, Any]] = {"addition": {"digits": 2, "base": 5}}
WARM_STEPS = {
    "addition": 120,
    "sequence_lock": 20,
    "sorting": 20,
    "noisy_copying": 20,
    "brackets": 20,
    "maze": 20,
    "correct_and_short": 40,
    "long_tail": 20,
    "noisy_verifier": 20,
    "preferences": 100,
    "text_maze": 15,
    "tool_first": 25,
    "search": 120,
}
WINDOW = 10  # iterations whose mean is the reward at a time
SETTINGS = LabSettings(iterations=200)


@dataclass(frozen=True)
class LabConfig:
    """What a laboratory runs. InputError for counts below 1 and numbers out of range."""

    algorithms: tuple[str, ...]
    tasks: tuple[str, ...] = ("addition",)
    seeds: int = 8
    first_seed: int = 0
    """Seeds are first_seed ... first_seed + seeds - 1."""
    grid: Grid = field(default_factory=dict)
    settings: LabSettings = SETTINGS
    baseline: str = ""
    """The method to compare with, at the first point of the grid. Empty: grpo if it is among them, else the first."""
    warm_steps: int | None = None
    """Supervised steps before; None: those of `WARM_STEPS`."""
    threshold: float | None = None
    """Reward to reach; None: halfway from the start to the best that is known."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("algorithms", len(self.algorithms), least=1, whole=True)
        check_number("tasks", len(self.tasks), least=1, whole=True)
        check_number("seeds", self.seeds, least=1, most=2**16, whole=True)
        check_number("first_seed", self.first_seed, least=0, most=2**30, whole=True)
        check_number("warm_steps", self.warm_steps, least=0, most=2**20, whole=True, or_none=True)
        check_number("threshold", self.threshold, or_none=True)

    @property
    def window(self) -> int:
        """Iterations whose mean is the reward at a time."""
        return min(WINDOW, self.settings.iterations)

    @property
    def compared_with(self) -> str:
        """The name of the baseline."""
        return self.baseline or ("grpo" if "grpo" in self.algorithms else self.algorithms[0])

    def steps_before(self, task: str) -> int:
        """Supervised steps of a task."""
        return WARM_STEPS[task] if self.warm_steps is None else self.warm_steps

    def in_common(self) -> dict[str, Any]:
        """What runs that stand in one table have in common, as JSON."""
        return {
            "seeds": self.seeds,
            "first_seed": self.first_seed,
            "grid": {name: list(values) for name, values in self.grid.items()},
            "settings": dataclasses.asdict(self.settings),
            "warm_steps": self.warm_steps,
            "threshold": self.threshold,
        }
