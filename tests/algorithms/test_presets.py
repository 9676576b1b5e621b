"""Presets: named sets of defaults that explicit arguments override."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.method import presets, presets_of
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.signatures import hyperparameters
from jaxrl_llm.utils.errors import InputError

SEEN: list[tuple[Any, ...]] = []


@presets(paper={"b": 20}, code={"a": 10, "c": None})
def method(a: int = 1, b: int = 2, c: float | None = 3.0) -> Algorithm:
    SEEN.append((a, b, c))
    return algorithms.get("gspo")


@pytest.mark.parametrize(
    ("args", "given", "expected"),
    [
        ((), {}, (1, 2, 3.0)),
        ((), {"preset": None}, (1, 2, 3.0)),
        ((), {"preset": "paper"}, (1, 20, 3.0)),
        ((), {"preset": "code"}, (10, 2, None)),
        ((), {"preset": "code", "a": 1, "c": 4.0}, (1, 2, 4.0)),
        ((7,), {"preset": "code"}, (7, 2, None)),
        ((7, 8), {"preset": "paper", "c": None}, (7, 8, None)),
    ],
)
def test_what_is_given_wins_over_a_preset_and_that_over_defaults(args: Any, given: Any, expected: Any) -> None:
    method(*args, **given)
    assert SEEN[-1] == expected


def test_a_preset_is_one_of_the_methods_own() -> None:
    with pytest.raises(InputError, match="method: preset is 'papper', but must be one of paper, code"):
        method(preset="papper")
    with pytest.raises(InputError, match="unknown hyper-parameter of one 'd'"):

        @presets(paper={"d": 1})
        def one(a: int = 1) -> Algorithm:
            return algorithms.get("gspo")

    assert presets_of(method) == {"paper": {"b": 20}, "code": {"a": 10, "c": None}}
    assert presets_of(algorithms.constructor("grpo")) == {}


def test_presets_of_the_catalogue_are_methods_within_their_ranges() -> None:
    found = {name: presets_of(algorithms.constructor(name)) for name in algorithms.names()}
    assert "dapo" in {name for name, sets in found.items() if sets}
    for name, sets in found.items():
        for preset in sets:
            algorithms.get(name, preset=preset)


def test_the_command_line_takes_a_presets_values_for_defaults() -> None:
    """The configuration holds every value, so that a preset that changes later changes no run."""
    chosen = parse_config(["--algorithm", "dapo", "--algorithm.preset", "code"]).hyperparameters
    assert (chosen["preset"], chosen["average"], chosen["dual_clip"]) == ("code", "token", 10.0)
    chosen = parse_config(
        ["--algorithm=dapo", "--algorithm.preset=paper", "--algorithm.dual-clip", "3"]
    ).hyperparameters
    assert (chosen["preset"], chosen["average"], chosen["dual_clip"]) == ("paper", "prompt", 3.0)
    plain = parse_config(["--algorithm", "dapo"]).hyperparameters
    assert (plain["preset"], plain["average"], plain["dual_clip"]) == (None, "token", None)
    with pytest.raises(InputError, match="unknown preset of dapo 'cod': did you mean 'code'"):
        parse_config(["--algorithm", "dapo", "--algorithm.preset", "cod"])
    assert {one.name: one.default for one in hyperparameters("dapo", "code")}["dual_clip"] == 10.0
