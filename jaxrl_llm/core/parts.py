"""What parts are written with: batches, transforms and objectives, and decorators that let a part print as its code."""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax.numpy as jnp

from jaxrl_llm.core.loss_metrics import Metrics
from jaxrl_llm.core.objective import Objective, control
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.core.trajectory import Array, PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.core.transform import State, Transform, chain, controller, counted, names_of, stateless
from jaxrl_llm.utils.errors import InputError

__all__ = [
    "Array", "Metrics", "Objective", "PolicyOutputs", "State", "Trajectories", "Transform", "batch_part", "chain",
    "control", "controller", "counted", "counted_part", "objective_part", "part", "row_means", "stateless",
    "stateless_part", "step_part", "surrogate_part", "totals_of", "weighted",
]  # fmt: skip
One = TypeVar("One")
Other = TypeVar("Other")
Value = TypeVar("Value")
Settings = ParamSpec("Settings")


class Returned(NamedTuple):
    """What a function must return: a check, and the words for it."""

    holds: Callable[[Any], bool]
    what: str


def _with_metrics(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


BATCH = Returned(lambda value: isinstance(value, Trajectories), "the batch, such as batch.replace(...)")
TERMS = Returned(_with_metrics, "(gain of each token, statistics by name)")
LOSS = Returned(
    lambda value: _with_metrics(value) and jnp.shape(value[0]) == (),
    "(loss, metrics by name), the loss a scalar, such as token_mean()(losses, batch)",
)


def batch_part(function: Callable[Concatenate[One, Settings], Value]) -> Callable[Settings, Callable[[One], Value]]:
    """Decorate a function of a batch and of settings: given the settings alone, it returns a function of the batch.

    What it returns is a `part`.

    >>> @batch_part
    ... def scaled(batch, factor=1.0):
    ...     return batch * factor
    >>> scaled(2.0), scaled(2.0)(3.0)
    (scaled(2.0), 6.0)
    """
    return settings_first(function, 1)


def step_part(
    function: Callable[Concatenate[One, Other, Settings], Value],
) -> Callable[Settings, Callable[[One, Other], Value]]:
    """`batch_part` of a function of a step, a batch and settings: it returns a function of step and batch."""
    return settings_first(function, 2)


def surrogate_part(
    function: Callable[Concatenate[Any, PolicyOutputs, Trajectories, Settings], Value],
) -> Callable[Settings, Callable[[Any, PolicyOutputs, Trajectories], Value]]:
    """`batch_part` of a function of a ratio, outputs, a batch and settings: it returns a function of these three."""
    return settings_first(function, 3, returns=TERMS)


def stateless_part(
    needs: Iterable[str] = (),
) -> Callable[[Callable[Concatenate[Trajectories, Settings], Trajectories]], Callable[Settings, Transform]]:
    """Decorate a function of a batch and of settings that returns the batch: given the settings, it is a `stateless`.

    needs: of the transform.
    """
    _check_needs("stateless_part", needs)
    return lambda function: settings_first(function, 1, functools.partial(stateless, needs=needs), Transform, BATCH)


def counted_part(
    needs: Iterable[str] = (),
) -> Callable[[Callable[Concatenate[Any, Trajectories, Settings], Trajectories]], Callable[Settings, Transform]]:
    """`stateless_part` of a function of a step, a batch and settings: given the settings, it is a `counted`."""
    _check_needs("counted_part", needs)
    return lambda function: settings_first(function, 2, functools.partial(counted, needs=needs), Transform, BATCH)


def objective_part(
    needs: Iterable[str] = (),
) -> Callable[
    [Callable[Concatenate[PolicyOutputs, Trajectories, Settings], tuple[Any, Metrics]]], Callable[Settings, Objective]
]:
    """Decorate a function of outputs, a batch and settings that returns loss and metrics: given the settings, it is an
    `Objective` with these needs."""
    _check_needs("objective_part", needs)
    made = functools.partial(Objective, needs=names_of(needs))
    return lambda function: settings_first(function, 2, made, Objective, LOSS)


def _check_needs(decorator: str, needs: Any) -> None:
    """InputError for a decorator that was given the function itself in place of needs."""
    if callable(needs):
        raise InputError(f"@{decorator} stands above a function without parentheses: write @{decorator}()")


def settings_first(
    function: Callable[..., Any],
    values: int,
    made: Callable[..., Any] = lambda of: of,
    kind: Any = None,
    returns: Returned | None = None,
) -> Callable[..., Any]:
    """The factory of parts that takes the parameters of a function after the first `values`, which come later.

    made: of the function of these values, what the factory returns; the function's `settings` are the others by name.
    kind: the type of what is returned; None: a function. returns: what the function itself must return.
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
        bound = settings.bind(*args, **given)

        def applied(*first_values: Any) -> Any:
            value = function(*first_values, *args, **given)
            if returns is not None and not returns.holds(value):
                raise InputError(f"what {function.__name__} returns is {in_words(value)}, but must be {returns.what}")
            return value

        bound.apply_defaults()
        applied.settings, applied.__signature__ = bound.arguments, first  # type: ignore[attr-defined]
        return made(applied)

    factory.__signature__ = settings  # type: ignore[attr-defined]
    factory.__annotations__ = kinds
    return part(factory)
