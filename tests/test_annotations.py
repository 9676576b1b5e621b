"""Choices by name: their types list exactly the names that are accepted at run time."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from jaxrl_llm import advantages, algorithms, objectives
from jaxrl_llm.advantages import returns, risk, tokens
from jaxrl_llm.algorithms.credit import verl_velocity_rank
from jaxrl_llm.algorithms.policy_loss import bapo_adaptive_clip
from jaxrl_llm.core import annotations
from jaxrl_llm.objectives import averages, covariance, off_policy
from jaxrl_llm.utils.errors import InputError

MODULES = (
    advantages, objectives, verl_velocity_rank, returns, risk, tokens, bapo_adaptive_clip, averages,
    off_policy, covariance,
)  # fmt: skip
FILLED = {
    "span": "sequence",
    "rho": objectives.token_ratio(),
    "target": 0.5,
    "bound": 0.1,
    "low": 0.1,
    "high": 0.1,
    "coefficient": 0.1,
    "groups": {},
}
OWN = {"find_bounds": {"low": (0.6, 0.9, 0.1), "high": (1.2, 3.0, 0.1)}}  # where values of other kinds are asked for


def chosen(build: Callable[..., Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The parameters of a function that are choices, with their names."""
    hints = typing.get_type_hints(build)
    for name in inspect.signature(build).parameters:
        for kind in (hints.get(name), *typing.get_args(hints.get(name))):
            if typing.get_origin(kind) is Literal and name != "preset":
                yield name, typing.get_args(kind)


PARTS = {
    name: value for module in MODULES for name, value in vars(module).items() if getattr(value, "makes_parts", False)
}
CASES = [(build, *case) for build in PARTS.values() for case in chosen(build)]
METHODS = [(build, *case) for build in algorithms.CATALOGUE.values() for case in chosen(build)]


@pytest.mark.parametrize(("build", "name", "names"), CASES + METHODS)
def test_another_name_is_refused_with_the_known_ones(build: Any, name: str, names: tuple[str, ...]) -> None:
    required = [p.name for p in inspect.signature(build).parameters.values() if p.default is p.empty and p.name != name]
    given = {one: FILLED[one] if one in FILLED else pytest.skip(f"{build.__name__} needs {one}") for one in required}
    with pytest.raises(InputError, match="no such") as error:
        build(**{**given, **OWN.get(build.__name__, {})}, **{name: "no such"})
    assert set(error.value.known) == set(names)
    assert "\n" not in str(error.value)


def test_there_are_choices_and_each_shared_one_is_used() -> None:
    assert len(CASES) > 30
    assert len(METHODS) > 60
    listed = [set(typing.get_args(kind)) for kind in vars(annotations).values() if typing.get_origin(kind) is Literal]
    used = [set(names) for _, _, names in CASES + METHODS]
    assert all(one in used for one in listed)
