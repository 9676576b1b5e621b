"""Every algorithm prints as the code that composes it: evaluated again, it computes the same."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from experience import case, learn
from heavy import few

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.method import presets_of
from jaxrl_llm.core.repr import is_code, leaves

CHOICES = [
    (name, preset) for name in algorithms.names() for preset in (None, *presets_of(algorithms.constructor(name)))
]


def namespace(value: Any) -> dict[str, Any]:
    """The public names that a value's expression is made of."""
    functions = {leaf.__name__: leaf for leaf in leaves(value) if callable(leaf)}
    return {
        name: of_catalogue(name, one) or getattr(sys.modules[one.__module__], name) for name, one in functions.items()
    }


def of_catalogue(name: str, function: Any) -> Any:
    """The method of this name, unless the function is another with its name: a loss "ipo" is."""
    return algorithms.CATALOGUE.get(name) if function.__module__.startswith("jaxrl_llm.algorithms") else None


def program(algorithm: algorithms.Algorithm) -> tuple[str, list[bytes]]:
    """The text of `learn` and its constants: where these are equal, so are all results."""
    cases = [case(seed, algorithm) for seed in ((11, 12) if "feedback" in algorithm.needs else (11,))]
    traced = jax.make_jaxpr(partial(learn, algorithm))(cases)
    return re.sub("0x[0-9a-f]+", "", str(traced)), [np.asarray(x).tobytes() for x in traced.consts]


@pytest.mark.parametrize(("name", "preset"), CHOICES)
def test_what_it_prints_composes_it(name: str, preset: str | None) -> None:
    """The expression of what the printed code makes is the printed code: nothing is lost on the way."""
    algorithm = algorithms.get(name, **({} if preset is None else {"preset": preset}))
    assert is_code(algorithm)
    again = eval(repr(algorithm), namespace(algorithm))
    assert repr(again) == repr(algorithm)
    assert (again.needs, again.strategy) == (algorithm.needs, algorithm.strategy)
    assert (again.curriculum is None) == (algorithm.curriculum is None)


@pytest.mark.parametrize(
    ("name", "preset"), few(CHOICES, [("grpo", None), ("ppo_max", "code"), ("rloo", None)], unpack=True)
)
def test_what_it_prints_computes_the_same(name: str, preset: str | None) -> None:
    algorithm = algorithms.get(name, **({} if preset is None else {"preset": preset}))
    assert program(eval(repr(algorithm), namespace(algorithm))) == program(algorithm)
