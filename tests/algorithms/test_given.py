"""Algorithms outside of the catalogue: values, functions of hyper-parameters, and either in a file."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms import build_of, constructor
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.annotations import Baseline
from jaxrl_llm.core.arguments.hyperparameters import Hyperparameter, checked_method, hyperparameters_of
from jaxrl_llm.core.arguments.signatures import of_function
from jaxrl_llm.objectives import clip, entropy, policy_gradient, token_mean, token_ratio
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.hyperparameters import options_of
from jaxrl_llm.training.method import make_algorithm, named, record_of
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.value_digest import value_digest

FILE = '''
"""No annotation of this file is a string, and some are."""
from functools import partial
from typing import Literal
from jaxrl_llm.core.annotations import Baseline
from jaxrl_llm.algorithms import Algorithm, dapo, get
from jaxrl_llm.advantages import group_relative
from jaxrl_llm.objectives import clip, entropy, policy_gradient, token_mean, token_ratio

value = get("grpo", kl_coefficient=0.0)
DEFAULT = 0.3


def mine(clip_high: float = 0.28, bonus: "float | None" = 0.01, rounds=2, name: str = "std") -> Algorithm:
    gradient = policy_gradient(token_ratio(), clip(0.2, clip_high), token_mean())
    return Algorithm(group_relative(scale=name), gradient - (bonus or 0.0) * entropy())


def by_run(max_length: int, total_steps: int | None = None, *, clip_high: float = DEFAULT) -> Algorithm:
    return mine(clip_high, bonus=1 / (max_length + total_steps))


short = partial(mine, clip_high=0.4)
lonely = mine


def chosen(scale: Literal["std", "none"] = "std", baseline: Baseline | None = None) -> Algorithm:
    return mine(name=scale)


def needy(clip_high: float) -> Algorithm:
    return mine(clip_high)


def untyped(clip_high):
    return mine(clip_high)


def of_parts(transform=group_relative(), bonus: float = 0.1) -> Algorithm:
    return mine(bonus=bonus)


def raising(clip_high: float = 0.2):
    return 1 / 0


def wrong():
    return mine


number = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


def mine(clip_high: float = 0.28, rounds: int = 2) -> Algorithm:
    gradient = policy_gradient(token_ratio(), clip(0.2, clip_high), token_mean())
    return Algorithm(algorithms.get("dapo").transform, gradient - 0.01 * entropy())


def of_choice(baseline: Baseline | None = None) -> Algorithm:
    return mine()


def plain(number, whole, flag, maybe, either, scale, name, free):  # type: ignore[no-untyped-def]
    return mine()


WRITTEN = ["float", "int", "bool", "float | None", "float | None", "typing.Literal['a', 'b']", "Baseline"]
KINDS = [float, int, bool, float | None, typing.Optional[float], typing.Literal["a", "b"], Baseline]  # noqa: UP045
plain.__annotations__ = dict(zip(inspect.signature(plain).parameters, KINDS, strict=False))


def written_as(annotations: dict[str, str]) -> Any:
    """`plain` but for its last parameter, with annotations as text, of which one more has a name that is nowhere."""

    def plain(number, whole, flag, maybe, either, scale, name):  # type: ignore[no-untyped-def]
        return mine()

    plain.__annotations__ = {**annotations, "return": "Nowhere"}
    return plain


def test_types_are_checked_with_annotations_of_both_kinds() -> None:
    """Those of a module with `from __future__ import annotations` are text, others are types."""
    found = hyperparameters_of(plain)
    assert [one.kind for one in found] == [*KINDS, Any]
    assert [one.type for one in found] == [float, int, bool, float, float, str, str, Any]
    assert [one.is_optional for one in found] == [False, False, False, True, True, False, False, False]
    assert (found[5].choices, found[6].choices) == (("a", "b"), typing.get_args(Baseline))
    text = dict(zip(inspect.signature(plain).parameters, WRITTEN, strict=False))
    assert hyperparameters_of(written_as(text)) == found[:-1]
    good = {"number": 0.5, "whole": 1, "flag": True, "maybe": None, "either": 0.5, "scale": "a", "name": "mean"}
    method = checked_method(plain)
    assert isinstance(method(**good, free=object()), Algorithm)
    for name, value, message in [
        ("number", "0.5", "plain: number is '0.5', but must be a number"),
        ("whole", 1.5, "plain: whole is 1.5, but must be a whole number"),
        ("flag", 1, "plain: flag is 1, but must be true or false"),
        ("maybe", "x", "plain: maybe is 'x', but must be a number"),
        ("either", "x", "plain: either is 'x', but must be a number"),
        ("scale", 3, "plain: scale is 3, but must be text"),
        ("name", 3, "plain: name is 3, but must be text"),
    ]:
        with pytest.raises(InputError, match=f"^{message}$"):
            method(**{**good, "free": None, name: value})


def test_a_value_a_function_and_a_name_are_built_alike(file: Path) -> None:
    value = algorithms.get("rloo")
    assert build_of(value)() is value
    assert value_digest(build_of(mine)(clip_high=0.3)) == value_digest(mine(0.3))
    assert value_digest(build_of(partial(mine, 0.3))()) == value_digest(mine(0.3))
    assert build_of("dapo") is algorithms.dapo
    in_a_file = constructor(f"{file}:mine")
    assert isinstance(in_a_file(clip_high=0.3, bonus=None), Algorithm)
    assert list(inspect.signature(in_a_file).parameters) == ["clip_high", "bonus", "rounds", "name"]
    assert isinstance(algorithms.get(f"{file}:short", bonus=0.2), Algorithm)
    assert value_digest(algorithms.get(f"{file}:value")) == value_digest(algorithms.get("grpo", kl_coefficient=0.0))


@pytest.mark.parametrize(
    ("given", "hyperparameters", "message"),
    [
        (mine, {"clip_hihg": 0.3}, r"unknown hyper-parameter of mine 'clip_hihg': did you mean 'clip_high'\?"),
        (mine, {"clip_high": "0.3"}, r"^mine: clip_high is '0.3', but must be a number$"),
        (mine, {"clip_high": float("nan")}, r"^mine: clip_high is nan, but must be"),
        (mine, {"rounds": 1.5}, r"^mine: rounds is 1.5, but must be a whole number$"),
        (partial(mine), {"rounds": 1.5}, r"^mine: rounds is 1.5"),
        (algorithms.get("rloo"), {"clip_high": 0.3}, r"is a value, which has no hyper-parameters: leave out clip_high"),
        ("FILE:needy", {}, r"own.py:needy cannot be built: missing a required argument: 'clip_high'"),
        ("FILE:raising", {}, r"own.py:raising cannot be built: ZeroDivisionError: division by zero$"),
        ("FILE:wrong", {}, r"own.py:wrong returns of the type function, but must return an Algorithm$"),
        ("FILE:mine", {"clip_high": "0.3"}, r"own.py:mine: clip_high is '0.3', but must be a number$"),
        ("FILE:mine", {"bonus": "x"}, r"own.py:mine: bonus is 'x', but must be a number$"),
        ("FILE:chosen", {"scale": 3}, r"own.py:chosen: scale is 3, but must be text$"),
        ("FILE:chosen", {"scale": "stdd"}, r"scale of .*:chosen 'stdd': did you mean 'std'\? Known: none, std$"),
        ("FILE:chosen", {"baseline": "?"}, r"^unknown baseline of .*own.py:chosen '\?'\. Known: best, "),
        (of_choice, {"baseline": "?"}, r"^unknown baseline of of_choice '\?'\. Known: best, "),
        ("FILE:mine", {"clip_high": -1.0}, r"clip"),  # the part that gets it checks its range
    ],
)
def test_wrong_hyperparameters_are_named_in_a_line(
    file: Path, given: Any, hyperparameters: dict[str, Any], message: str
) -> None:
    given = given.replace("FILE", str(file)) if isinstance(given, str) else given
    with pytest.raises(InputError, match=message) as error:
        build_of(given)(**hyperparameters)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"^the algorithm is None, not an Algorithm, or a function of hyper-parameters that returns one$"),
        (3, r"^the algorithm is of the type int, not an Algorithm"),
        (entropy(), r"of the type Objective, not an Algorithm, .*Algorithm\(transform=\.\.\., objective=\.\.\.\)"),
        ("FILE:number", r"own.py:number is of the type int, but must be an Algorithm, or a function"),
        ("FILE:mini", r"unknown name in '.*own.py' 'mini': did you mean 'mine'\?"),
        ("FILE", r"names nothing in the file: write .*own.py:NAME$"),
        ("nowhere/own.py:mine", r"^no file 'nowhere/own.py' in .* for the algorithm: give the path of a Python file$"),
        ("jaxrl_llm.nowhere:mine", r"cannot load an algorithm from 'jaxrl_llm.nowhere': ModuleNotFoundError"),
        ("python:mine", r"was given by a Python program \('mine'\).*train\(Run\(FOLDER\).config, resume=True"),
    ],
)
def test_what_is_no_algorithm_is_refused(file: Path, given: Any, message: str) -> None:
    given = given.replace("FILE", str(file)) if isinstance(given, str) else given
    with pytest.raises(InputError, match=message) as error:
        build_of(given)
    assert "\n" not in str(error.value)


def test_a_package_names_algorithms_too() -> None:
    found = algorithms.get("jaxrl_llm.algorithms.classic.grpo:grpo", clip_high=0.3)
    assert value_digest(found) == value_digest(algorithms.get("grpo", clip_high=0.3))


@pytest.mark.parametrize("name", ["mine", "needy"])
def test_options_of_a_function_in_a_file_are_its_parameters(file: Path, name: str) -> None:
    assert of_function(constructor(f"{file}:{name}"), name) == options_of(f"{file}:{name}")


def test_options_of_other_values_in_a_file(file: Path) -> None:
    assert options_of(f"{file}:value") == []
    assert options_of(f"{file}:by_run")[-1] == Hyperparameter("clip_high", float, 0.3)
    assert [one.name for one in options_of(f"{file}:lonely")] == ["clip_high", "bonus", "rounds", "name"]
    assert options_of(f"{file}:of_parts") == [Hyperparameter("bonus", float, 0.1)]
    with pytest.raises(InputError, match=r"clip_high of .*:untyped has neither a default nor a type"):
        options_of(f"{file}:untyped")
    assert options_of("python:mine") == []


def test_a_run_fills_in_what_it_knows(file: Path) -> None:
    config = TrainConfig(algorithm=f"{file}:by_run", max_new_tokens=30, steps=20)
    direct = algorithms.get(f"{file}:mine", clip_high=0.3, bonus=1 / 50)
    # Functions of one file are compared by their code, though each call runs the file anew.
    assert value_digest(make_algorithm(config)) == value_digest(direct)
    given = TrainConfig(hyperparameters={"clip_high": 0.5})
    assert value_digest(make_algorithm(given, mine)) == value_digest(mine(0.5))
    chained = make_algorithm(TrainConfig(overlong_tokens=8), mine)
    assert value_digest(chained) != value_digest(mine())
    assert value_digest(chained.objective) == value_digest(mine().objective)


def test_the_configuration_says_what_is_trained() -> None:
    config = TrainConfig()
    assert named(config, None) == config
    assert named(config, "dapo").algorithm == "dapo"
    assert named(config, algorithms.dapo).algorithm == "dapo"
    assert named(config, mine).algorithm == "python:mine"
    assert named(config, partial(mine, rounds=3)).algorithm == "python:mine"
    assert named(config, mine()).algorithm == "python:algorithm"
    longer = mine()  # a value has the name of its variable, which its run keeps
    assert named(config, longer).algorithm == "python:longer"
    assert named(dataclasses.replace(config, algorithm="python:first"), longer).algorithm == "python:first"
    for value in (mine, mine()):
        with pytest.raises(
            InputError, match=r"^algorithm is a value, .*: give the value to train\(config, algorithm=\)$"
        ):
            TrainConfig(algorithm=value)  # type: ignore[arg-type]
    message = "is a value, which has no hyper-parameters: leave out clip_high, rounds, or give a function"
    with pytest.raises(InputError, match=re.escape(message)):
        named(TrainConfig(hyperparameters={"clip_high": 0.3, "rounds": 2}), mine())


def test_what_is_recorded_of_an_algorithm() -> None:
    config = TrainConfig()
    assert record_of(config, algorithms.get("grpo")) == {}
    assert record_of(config, algorithms.dapo(), algorithms.dapo) == {}
    assert record_of(config, algorithms.get("grpo"), algorithms.get("grpo"))["needs"] == ["reference_logp"]
    made = record_of(config, mine(), mine)
    assert made["needs"] == []
    assert made["source"].startswith("def mine(clip_high: float = 0.28")
    assert "source" not in record_of(config, mine(), mine())
