"""The catalogue: one file for each published method, with one short function that returns an `Algorithm`.

`FAMILIES` are its folders: `classic` has the maintained methods, the others methods as they were published. A method is
a function with the name of its file, decorated with `@method`; it is imported when it is asked for.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_llm.algorithms.given import Build, Given, builder, from_file
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.arguments.signatures import is_in_file, unknown_method
from jaxrl_llm.utils.errors import InputError, shown

MAINTAINED = "classic"
FAMILIES = (  # in the order of the data flow, after those to begin with
    MAINTAINED,
    "prompts",
    "guidance",
    "exploration",
    "rewards",
    "replay",
    "credit",
    "turn_credit",
    "agents",
    "score_function",
    "evolution",
    "policy_loss",
    "regularisation",
    "preferences",
    "online_preferences",
    "judged",
    "distillation",
    "diffusion",
)


@cache
def families() -> dict[str, str]:
    """The family of each method, by name: the folder of its file."""
    folder = Path(__file__).parent
    return {
        path.stem: family
        for family in FAMILIES
        for path in sorted((folder / family).glob("*.py"))
        if path.stem != "__init__"
    }


class _Catalogue(MutableMapping[str, Build]):
    """The functions that build methods, by name, imported at first use; others can be added."""

    def __init__(self) -> None:
        self._imported: dict[str, Build] = {}

    def __getitem__(self, name: str) -> Build:
        if name not in self._imported:
            module = importlib.import_module(f"{__name__}.{families()[name]}.{name}")
            self._imported[name] = getattr(module, name)
        return self._imported[name]

    def __setitem__(self, name: str, build: Build) -> None:
        self._imported[name] = build

    def __delitem__(self, name: str) -> None:
        del self._imported[name]

    def __contains__(self, name: object) -> bool:
        return name in families() or name in self._imported

    def __iter__(self) -> Iterator[str]:
        return iter({**families(), **self._imported})

    def __len__(self) -> int:
        return len({*families(), *self._imported})


CATALOGUE: MutableMapping[str, Build] = _Catalogue()


def names() -> list[str]:
    """Names of all methods."""
    return sorted(CATALOGUE)


def constructor(name: str) -> Build:
    """The function that builds a method of the catalogue, or of a file: path/to/file.py:NAME, package.module:NAME.

    Raises InputError, with the nearest name, for an unknown name, and for a file that cannot be loaded.
    """
    if not isinstance(name, str):
        raise InputError(f"an algorithm is given by its name, but found {shown(name)}: see algorithms.names()")
    if is_in_file(name):
        return from_file(name)[0]
    if name not in CATALOGUE:
        raise unknown_method(name, CATALOGUE)
    return CATALOGUE[name]


def get(name: str, **hyperparameters: Any) -> Algorithm:
    """Build a method by name. InputError for an unknown name or hyper-parameter, and for a value out of range."""
    return constructor(name)(**hyperparameters)


def build_of(algorithm: Given) -> Build:
    """The function of hyper-parameters that builds what is given: a name, an Algorithm, or a function that makes one.

    Raises InputError for anything else, and as `constructor` and `given.builder` do.
    """
    return constructor(algorithm) if isinstance(algorithm, str) else builder(algorithm)


def with_facts(build: Callable[..., Algorithm], given: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """The given hyper-parameters, completed by those facts of the run that are parameters of `build` and not given.

    facts: max_length (longest completion, tokens), total_steps (iterations), learning_rate; adam_beta1,
    adam_beta2, adam_epsilon, reward_stages (its rewards in their order, as "NAME=WEIGHT,...").
    """
    known = inspect.signature(build).parameters
    chosen = {name: value for name, value in given.items() if value is not None}
    return {**{name: value for name, value in facts.items() if name in known}, **chosen}


def __getattr__(name: str) -> Build:
    if not name.startswith("_") and name in CATALOGUE:
        return CATALOGUE[name]
    raise AttributeError(f"{__name__} has no attribute {name!r}")


__all__ = [
    "CATALOGUE", "Algorithm", "Build", "DynamicSampling", "Given", "build_of", "constructor", "get", "names",
    "with_facts",
]  # fmt: skip
