"""A grid of numeric hyper-parameters: learning_rate=1e-3,3e-3 clip_low=0.1,0.2."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Mapping

from jaxrl_llm.algorithms import constructor
from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.utils.errors import InputError, shown

Grid = Mapping[str, tuple[float, ...]]
Point = dict[str, float]


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


def hyperparameters_of(method: str) -> set[str]:
    """Those that a grid may vary: the method's own, and the learning rate. InputError for an unknown method."""
    return {"learning_rate", *inspect.signature(constructor(method)).parameters}


def points(grid: Grid, known: Collection[str]) -> list[Point]:
    """Every combination of the values of those hyper-parameters that are known to a method; at least one, {}.

    >>> points({"clip_low": (0.1, 0.2), "tau": (1.0,)}, ["clip_low"])
    [{'clip_low': 0.1}, {'clip_low': 0.2}]
    """
    own = {name: values for name, values in grid.items() if name in known}
    return [dict(zip(own, values, strict=True)) for values in itertools.product(*own.values())]
