"""What parts are written with: batches, transforms and objectives, and decorators that let a part print as its code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.core.transform import (
    Metrics,
    Objective,
    State,
    Transform,
    chain,
    control,
    controller,
    counted,
    stateless,
)

__all__ = [
    "Array", "Metrics", "Objective", "PolicyOutputs", "State", "Trajectories", "Transform", "batch_part", "chain",
    "control", "controller", "counted", "part", "row_means", "stateless", "stateless_part", "step_part", "totals_of",
    "weighted",
]  # fmt: skip
One = TypeVar("One")
Other = TypeVar("Other")
Value = TypeVar("Value")
Settings = ParamSpec("Settings")


def batch_part(function: Callable[Concatenate[One, Settings], Value]) -> Callable[Settings, Callable[[One], Value]]:
    """Decorate a function of a batch and of settings: given the settings alone, it returns a function of the batch.

    What it returns is a `part`.

    >>> @batch_part
    ... def scaled(batch, factor=1.0):
    ...     return batch * factor
    >>> scaled(2.0), scaled(2.0)(3.0)
    (scaled(2.0), 6.0)
    """
    return _settings_first(function, 1)


def step_part(
    function: Callable[Concatenate[One, Other, Settings], Value],
) -> Callable[Settings, Callable[[One, Other], Value]]:
    """`batch_part` of a function of a step, a batch and settings: it returns a function of step and batch."""
    return _settings_first(function, 2)


def stateless_part(
    needs: Iterable[str] = (),
) -> Callable[[Callable[Concatenate[Trajectories, Settings], Trajectories]], Callable[Settings, Transform]]:
    """Decorate a function of a batch and of settings that returns the batch: given the settings, it is a `stateless`.

    needs: of the transform.
    """

    def decorate(function: Callable[..., Trajectories]) -> Callable[..., Transform]:
        return _settings_first(function, 1, functools.partial(stateless, needs=needs))

    return decorate


def _settings_first(
    function: Callable[..., Any], values: int, made: Callable[[Callable[..., Any]], Any] = lambda of: of
) -> Callable[..., Any]:
    """The factory of parts that takes the parameters of a function after the first `values`, which come later.

    made: of the function of these values, what the factory returns.
    """
    signature = inspect.signature(function)
    settings = signature.replace(parameters=list(signature.parameters.values())[values:])

    @functools.wraps(function)
    def factory(*args: Any, **given: Any) -> Any:
        settings.bind(*args, **given)
        return made(lambda *first: function(*first, *args, **given))

    factory.__signature__ = settings  # type: ignore[attr-defined]
    return part(factory)
