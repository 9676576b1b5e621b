"""Every method of the catalogue: named, documented, checked, usable with its defaults."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import math
import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from experience import case, learn
from heavy import few

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.describe import COMPUTED, PLAIN, listing, method_card, page, parameters
from jaxrl_llm.algorithms.parts import going_without, missing
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import from_dict, to_dict
from jaxrl_llm.training.method import make_algorithm
from jaxrl_llm.utils.errors import InputError

FACTS = ("max_length", "total_steps", "learning_rate")  # that the run fills in where they are None
BEYOND = {"least": -0.5, "most": 0.5, "above": 0.0}
# Strings that name what only a run knows.
OPEN = (
    "agentic", "column", "component", "embedding", "end", "expert", "judge", "opening", "order", "peers", "placeholder",
    "profile", "rates", "separator", "wait", "weights",
)  # fmt: skip
every = pytest.mark.parametrize("name", algorithms.names())


@functools.cache
def lines() -> list[str]:
    return listing().splitlines()


def defaults(name: str) -> dict[str, object]:
    return {p.name: p.default for p in inspect.signature(algorithms.constructor(name)).parameters.values()}


def program(algorithm: algorithms.Algorithm) -> tuple[str, list[bytes]]:
    """The text of `learn` and its constants: where these are equal, so are all results.

    One update, or two where the second has other inputs: the metrics of the first.
    """
    cases = [case(seed, algorithm) for seed in ((11, 12) if "feedback" in algorithm.needs else (11,))]
    traced = jax.make_jaxpr(partial(learn, algorithm))(cases)
    return re.sub("0x[0-9a-f]+", "", str(traced)), [np.asarray(x).tobytes() for x in traced.consts]


def test_names_are_those_of_the_catalogue_in_order() -> None:
    assert algorithms.names() == sorted(algorithms.CATALOGUE)
    assert len(algorithms.names()) == len(set(algorithms.names())) >= 80
    assert set(algorithms.families().values()) == set(algorithms.FAMILIES)


@every
def test_its_docstring_names_the_paper_and_every_hyperparameter(name: str) -> None:
    text = inspect.getdoc(algorithms.constructor(name))
    assert text
    card = method_card(name)
    assert 1990 < card.facts.year < 2027
    assert text.split("\n\n")[0].endswith(".")
    for parameter in defaults(name):
        assert parameter in text or parameter in ("scale", "ddof", "epsilon"), f"{name} does not explain {parameter}"


@every
def test_its_page_and_line_are_printed(name: str) -> None:
    said = page(name)
    assert said.startswith(name)
    assert f"def {name}(" in said
    program = ast.parse(said.partition("Composition:")[2].partition("Tested by")[0])
    of_code = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert not [node.name for node in ast.walk(program) if isinstance(node, of_code) and ast.get_docstring(node)]
    for parameter in defaults(name):
        assert f"  {parameter} = " in said
    (line,) = (line for line in lines() if re.match(rf"  {name} [ *]+\d{{4}} ", line))
    assert str(method_card(name).facts.year) in line
    for need in method_card(name).needs:
        kind = need.partition(":")[0]
        assert f"  {need}: " in said
        assert (PLAIN.get(kind, kind) in line) != (need in COMPUTED), "the list says only what some runs lack"


@pytest.mark.parametrize("name", few(algorithms.names(), ("grpo", "ppo")))
def test_it_goes_through_configuration_unchanged(name: str) -> None:
    """Through JSON and through the command line to the same program of loss and gradient."""
    values = defaults(name)
    assert inspect.Parameter.empty not in values.values()
    config = TrainConfig(algorithm=name, hyperparameters=values)
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config
    parsed = parse_config(["--algorithm", name])
    assert parsed.hyperparameters == values
    if missing(name):
        parsed = parse_config(["--algorithm", name, "--algorithm.without", ",".join(missing(name))])
    facts = {"max_length": config.max_new_tokens, "total_steps": config.steps, "learning_rate": 1e-6}
    known = {fact: facts[fact] for fact in FACTS if values.get(fact, 0) is None}
    assert program(make_algorithm(parsed)) == program(going_without(algorithms.get(name, **known), missing(name)))


@every
def test_values_out_of_range_are_refused_by_name(name: str) -> None:
    for parameter, value in defaults(name).items():
        if isinstance(value, str):
            if parameter in OPEN:
                continue
            with pytest.raises(InputError, match="no such"):
                algorithms.get(name, **{parameter: "no such"})
        elif not isinstance(value, bool):
            with pytest.raises(InputError, match=f"{name}: {parameter} is nan"):
                algorithms.get(name, **{parameter: math.nan})
    for parameter, limits in ((one.name, one.range.limits) for one in parameters(name)):
        for wrong in (limits[bound] + step for bound, step in BEYOND.items() if bound in limits):
            with pytest.raises(InputError, match=f"{name}: {parameter} is {wrong}"):
                algorithms.get(name, **{parameter: wrong})


@every
def test_it_can_be_hashed(name: str) -> None:
    """As a static argument of a compiled function, or a key of a cache."""
    assert hash(algorithms.get(name)) is not None


@every
def test_it_is_within_its_own_ranges(name: str) -> None:
    algorithms.get(name, **defaults(name))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown algorithm 'gropo': did you mean 'grpo'"):
        algorithms.get("gropo")
    with pytest.raises(InputError, match="unknown algorithm"):
        algorithms.constructor("")
    with pytest.raises(AttributeError, match="gropo"):
        algorithms.gropo  # noqa: B018


def test_an_unknown_hyperparameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match="unknown hyper-parameter of grpo 'kl_coeficient': did you mean 'kl_coefficient'"
    ):
        algorithms.get("grpo", kl_coeficient=0.1)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"clip_low": "0.2"}, "clip_low is '0.2', but must be a number"),
        ({"clip_low": None}, "clip_low is None, but must be a number"),
        ({"clip_low": [0.2]}, r"clip_low is \[0.2\], but must be a number"),
        ({"clip_low": True}, "clip_low is True, but must be a number"),
        ({"clip_high": math.inf}, "clip_high is inf, but must be a finite number"),
        ({"clip_high": np.float32("inf")}, "clip_high is .*inf.*, but must be a finite number"),
        ({"clip_high": 1e300}, "clip_high is 1e.300, but must be a finite number"),
        ({"clip_high": np.ones(2)}, r"clip_high is an array of the shape \[2\], but must be a number"),
        ({"ddof": 0.5}, "ddof is 0.5, but must be a whole number"),
        ({"scale": 1}, "scale is 1, but must be text"),
    ],
)
def test_a_hyperparameter_of_another_type_is_named(wrong: dict[str, Any], words: str) -> None:
    for build in (functools.partial(algorithms.get, "grpo"), algorithms.grpo):
        with pytest.raises(InputError, match=f"grpo: {words}"):
            build(**wrong)


def test_flags_are_true_or_false() -> None:
    with pytest.raises(InputError, match="ppo: whiten is 'yes', but must be true or false"):
        algorithms.get("ppo", whiten="yes")


def test_hyperparameters_may_be_traced_or_of_numpy() -> None:
    def loss(clip: jax.Array) -> jax.Array:
        algorithms.get("grpo", clip_low=clip)
        return clip

    assert float(jax.jit(loss)(0.1)) == pytest.approx(0.1)
    assert algorithms.grpo(np.float32(0.1), kl_coefficient=np.int64(0)).needs == frozenset()


@pytest.mark.parametrize("name", [None, 3, ["grpo"]])
def test_a_method_is_given_by_its_name(name: Any) -> None:
    with pytest.raises(InputError, match="an algorithm is given by its name, but found"):
        algorithms.get(name)


def test_the_parts_of_an_algorithm_are_of_their_types() -> None:
    parts = algorithms.get("gspo")
    with pytest.raises(InputError, match=r"an algorithm's transform must be of the type Transform, but is .*Objective"):
        algorithms.Algorithm(parts.objective, parts.transform)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="an algorithm's strategy must be of the type Partial"):
        dataclasses.replace(parts, strategy="partial")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rounds of DynamicSampling is 0"):
        algorithms.DynamicSampling(lambda batch: batch.truncated, rounds=0)
