"""What parts are written with: batches, transforms and objectives, and decorators that let a part print as its code."""

from __future__ import annotations

import functools
import inspect
import typing
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
        return _settings_first(function, 1, functools.partial(stateless, needs=needs), Transform)

    return decorate


def _settings_first(
    function: Callable[..., Any], values: int, made: Callable[..., Any] = lambda of: of, kind: Any = None
) -> Callable[..., Any]:
    """The factory of parts that takes the parameters of a function after the first `values`, which come later.

    made: of the function of these values, what the factory returns. kind: the type of that; None: a function.
    """
    signature = inspect.signature(function)
    listed = list(signature.parameters.values())
    first = inspect.Signature(listed[:values])
    kinds = {one.name: one.annotation for one in listed if one.annotation is not one.empty}
    later = [kinds.pop(name, Any) for name in first.parameters]
    kinds["return"] = kind or typing.Callable[later, function.__annotations__.get("return", Any)]
    settings = inspect.Signature(listed[values:], return_annotation=kinds["return"])

    @functools.wraps(function)
    def factory(*args: Any, **given: Any) -> Any:
        settings.bind(*args, **given)

        def applied(*first_values: Any) -> Any:
            return function(*first_values, *args, **given)

        applied.__signature__ = first  # type: ignore[attr-defined]
        return made(applied)

    factory.__signature__ = settings  # type: ignore[attr-defined]
    factory.__annotations__ = kinds
    return part(factory)
