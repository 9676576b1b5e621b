"""Parameters as a table."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import parameter_count, parameter_table, policy

PARAMS = {"embed": jnp.zeros((5, 2), jnp.bfloat16), "layers": {"up": np.zeros((3, 2, 4), np.float32)}}


def test_it_has_a_row_for_each_array_and_a_total() -> None:
    found = parameter_table(PARAMS)
    assert found.rows == (("embed", (5, 2), "bfloat16", 10, 20), ("layers/up", (3, 2, 4), "float32", 24, 96))
    assert found.parameters == parameter_count(PARAMS) == 34
    assert found.bytes == 116
    lines = repr(found).splitlines()
    assert lines[2].split() == ["layers/up", "(3,", "2,", "4)", "float32", "24", "0.0"]
    assert lines[3].split() == ["all", "34", "0.0"]
    assert len({line.rindex(" 0.0") for line in lines[1:]}) == 1
    assert parameter_table({}).parameters == 0


def test_it_needs_no_values() -> None:
    shapes = jax.eval_shape(lambda: PARAMS)
    assert parameter_table(shapes) == parameter_table(PARAMS)


def test_its_example() -> None:
    assert doctest.testmod(policy).failed == 0
