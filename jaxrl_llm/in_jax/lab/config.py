"""What a laboratory runs, and its grid of numeric hyper-parameters: learning_rate=1e-3,3e-3 clip_low=0.1,0.2."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxrl_llm.algorithms import constructor
from jaxrl_llm.core.arguments.checks import check_fields, checked
from jaxrl_llm.core.arguments.ranges import Range, check_number
from jaxrl_llm.in_jax.settings import LabSettings
from jaxrl_llm.utils.errors import InputError, shown

Grid = Mapping[str, tuple[float, ...]]
Point = dict[str, float]
# Sizes of tasks, and supervised steps before reinforcement learning, after which the policy earns a part of the reward.
OPTIONS: dict[str, dict[str, Any]] = {"addition": {"digits": 2, "base": 5}}
_FEW = ("sequence_lock", "sorting", "noisy_copying", "brackets", "maze", "long_tail", "noisy_verifier")
WARM_STEPS = dict.fromkeys(_FEW, 20) | {"addition": 120, "correct_and_short": 40, "preferences": 100, "search": 120}
WARM_STEPS |= {"text_maze": 15, "tool_first": 25}
WINDOW = 10  # iterations whose mean is the reward at a time
SETTINGS = LabSettings(iterations=200)


@dataclass(frozen=True)
class LabConfig:
    """What a laboratory runs. InputError for counts below 1 and numbers out of range."""

    algorithms: tuple[str, ...]
    tasks: tuple[str, ...] = ("addition",)
    seeds: Annotated[int, Range(least=1, most=2**16)] = 8
    first_seed: Annotated[int, Range(least=0, most=2**30)] = 0
    """Seeds are first_seed ... first_seed + seeds - 1."""
    grid: Grid = field(default_factory=dict)
    settings: LabSettings = SETTINGS
    baseline: str = ""
    """The method to compare with, at the first point of the grid. Empty: grpo if it is among them, else the first."""
    warm_steps: Annotated[int | None, Range(least=0, most=2**20)] = None
    """Supervised steps before; None: those of `WARM_STEPS`."""
    threshold: float | None = None
    """Reward to reach; None: halfway from the start to the best that is known."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("algorithms", len(self.algorithms), least=1, whole=True)
        check_number("tasks", len(self.tasks), least=1, whole=True)

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
        own = dataclasses.asdict(self)
        names = ("seeds", "first_seed", "grid", "settings", "warm_steps", "threshold")
        grid = {name: list(values) for name, values in self.grid.items()}
        return {name: own[name] for name in names} | {"grid": grid}


@checked
def parse_grid(texts: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """The values of each hyper-parameter. InputError for what is no NAME=NUMBER,NUMBER ..., or is given twice.

    Whole numbers without a point stay whole, as some hyper-parameters are counts.

    >>> parse_grid(["learning-rate=1e-3,3e-3", "group=4"])
    {'learning_rate': (0.001, 0.003), 'group': (4,)}
    """
    found: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        try:
            numbers = tuple(_number(value) for value in values.split(","))
            if not all(map(math.isfinite, numbers)):
                raise ValueError
        except ValueError:
            numbers = ()
        if not name or not equals or not numbers:
            raise InputError(f"--grid {shown(text)} cannot be read: write NAME=NUMBER,NUMBER such as clip_low=0.1,0.2")
        if name in found or len(set(numbers)) < len(numbers):
            raise InputError(f"--grid gives {name} twice, or a value of it: give each once")
        found[name] = numbers
    return found


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def grid_parameters(method: str) -> set[str]:
    """Those that a grid may vary: the method's own, and the learning rate. InputError for an unknown method."""
    return {"learning_rate", *inspect.signature(constructor(method)).parameters}


def points(grid: Grid, known: Collection[str]) -> list[Point]:
    """Every combination of the values of those hyper-parameters that are known to a method; at least one, {}.

    >>> points({"clip_low": (0.1, 0.2), "tau": (1.0,)}, ["clip_low"])
    [{'clip_low': 0.1}, {'clip_low': 0.2}]
    """
    own = {name: values for name, values in grid.items() if name in known}
    return [dict(zip(own, values, strict=True)) for values in itertools.product(*own.values())]
