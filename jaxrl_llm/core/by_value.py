"""Python values among a run's settings: rewards, environments and tools that a program gives instead of names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxrl_llm.core.arguments.signatures import PYTHON
from jaxrl_llm.utils.errors import InputError


class ByValue(str):
    """The name of a value, such as python:my_reward, with the value. As JSON and in messages it is the name."""

    value: Any

    def __new__(cls, name: str, value: Any) -> ByValue:
        """The name begins with `PYTHON`."""
        made = super().__new__(cls, name)
        made.value = value
        return made

    def __deepcopy__(self, memo: Any) -> str:
        return str(self)

    def __reduce__(self) -> Any:
        return str, (str(self),)


def by_value(value: Any, otherwise: str) -> Any:
    """A function, a class, a dict of them or a `Reward` as a `ByValue`; anything else as it is.

    otherwise: the name of a value that has none, such as a lambda.
    """
    function = getattr(value, "function", None) if hasattr(value, "weight") else None
    several = isinstance(value, Mapping) and bool(value) and all(map(callable, value.values()))
    if isinstance(value, str) or not (callable(value) or function or several):
        return value
    if function is None:
        return ByValue(PYTHON + name_of(value, otherwise), value)
    weight = "" if value.weight == 1 else f"*{float(value.weight):g}"
    return ByValue(
        f"{PYTHON}{value.name if value.name.isidentifier() else name_of(function, otherwise)}{weight}", value
    )


def by_values(values: Any, kind: str) -> Any:
    """One or several values, each as `by_value` makes it; names that several have are numbered.

    kind: of those without a name, such as "reward". Anything without a value is returned as it is.
    """
    listed = values if isinstance(values, list | tuple) else [values]
    named = [by_value(one, f"{kind}_{number}") for number, one in enumerate(listed, start=1)]
    if not any(isinstance(one, ByValue) for one in named):
        return values
    for number, one in enumerate(named):
        if isinstance(one, ByValue) and one in named[:number] and "*" not in one:
            named[number] = ByValue(f"{one}_{number + 1}", one.value)
    return tuple(named)


def name_of(value: Any, otherwise: str) -> str:
    """The name of a function or class, or of an instance's class."""
    while isinstance(value, partial):
        value = value.func
    name = getattr(value, "__name__", None if isinstance(value, Mapping) else type(value).__name__)
    return name if isinstance(name, str) and name.isidentifier() else otherwise


def named_value(spec: str, what: str) -> Any:
    """The value of a name; None for a name that is looked up. InputError for that of a value which is not given.

    what: names it in errors, such as "the reward".
    """
    if isinstance(spec, ByValue):
        return spec.value
    if spec.startswith(PYTHON):
        name, argument = spec.removeprefix(PYTHON), what.split()[-1]
        argument = {"reward": "rewards=[...]", "tool": "tools=[...]"}.get(argument, f"{argument}=...")
        raise InputError(
            f"{what} {name} was given by a Python program, and is in no file: give it again, resume(FOLDER, "
            f"{argument}), or another name"
        )
    return None
