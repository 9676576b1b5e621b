"""Hyper-parameters as the command line reads them are those of the functions."""

import inspect
import subprocess
import sys
import typing

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.index import index
from jaxrl_llm.core.arguments.hyperparameters import hyperparameters_of
from jaxrl_llm.core.arguments.signatures import CATALOGUE, hyperparameters
from jaxrl_llm.utils.errors import InputError


@pytest.mark.parametrize("name", algorithms.names())
def test_read_from_the_index_as_python_reads_it(name: str) -> None:
    build = algorithms.constructor(name)
    hints, parameters = typing.get_type_hints(build), inspect.signature(build).parameters
    read = hyperparameters(name)
    # The command line gives no functions, which a program may give in place of a name.
    kinds = {p: str if p == "loss" and str in typing.get_args(hints[p]) else hints[p] for p in parameters}
    assert [one[:3] for one in read] == [(p, kinds[p], parameters[p].default) for p in parameters]
    assert [one.range for one in read] == [one.range for one in hyperparameters_of(build)]


def test_the_index_is_of_the_methods_as_they_are() -> None:
    assert CATALOGUE.read_text() == index(), "run python -m jaxrl_llm.algorithms.index"


def test_a_method_that_is_not_in_the_index_yet_is_read_from_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algorithms.CATALOGUE, "another", algorithms.constructor("dapo"))
    assert [one[:3] for one in hyperparameters("another")] == [one[:3] for one in hyperparameters("dapo")]


def test_an_unknown_method_has_a_nearest_name() -> None:
    with pytest.raises(InputError, match="unknown algorithm 'gropo': did you mean 'grpo'"):
        hyperparameters("gropo")


def test_options_and_inputs_import_no_jax() -> None:
    """So that what is wrong with a command is said in a moment."""
    program = (
        "import sys, jaxrl_llm.cli.options, jaxrl_llm.training.config, jaxrl_llm.data, jaxrl_llm.rewards; "
        "jaxrl_llm.cli.options.parse_config(['--algorithm', 'dapo', '--algorithm.clip-high', '0.3']); "
        "assert not {'jax', 'flax', 'optax', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
