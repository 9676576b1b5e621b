"""Hyper-parameters as read from the source are those of the functions."""

import inspect
import subprocess
import sys
import typing

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.core.signatures import hyperparameters
from jaxrl_llm.utils.errors import InputError


@pytest.mark.parametrize("name", algorithms.names())
def test_read_from_the_source_as_python_reads_it(name: str) -> None:
    build = algorithms.constructor(name)
    hints, parameters = typing.get_type_hints(build), inspect.signature(build).parameters
    assert [tuple(one) for one in hyperparameters(name)] == [(p, hints[p], parameters[p].default) for p in parameters]


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
