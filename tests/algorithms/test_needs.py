"""Needs as values: where they are, what they look like, and stand-ins that methods can use."""

from __future__ import annotations

import numpy as np
import pytest
from batches import batch_of
from experience import L, N, case

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.needs import NEEDS, need_of, value_of, values_of
from jaxrl_llm.errors import InputError

SHAPES = {"[N, L]": (N, L), "[N]": (N,), "[N, 3]": (N, 3), "[] each": ()}
PROBABILITIES = ("squared_probability", "cubed_probability", "reference_affinity")


@pytest.mark.parametrize("name", NEEDS)
def test_a_stand_in_is_of_its_shape_and_range(name: str) -> None:
    need, random = NEEDS[name], np.random.default_rng(0)
    logp = -random.gamma(2.0, 0.5, (N, L))
    found = need.stand_in(random, logp)
    assert need.name == name
    assert found.shape == SHAPES[need.shape]
    assert np.isfinite(found).all()
    if name.endswith("_logp"):
        assert (found <= 0).all()
    if name in PROBABILITIES:
        assert ((found > 0) & (found <= 1)).all()


@pytest.mark.parametrize("name", sorted({need for one in algorithms.names() for need in algorithms.get(one).needs}))
def test_it_is_found_where_it_says(name: str) -> None:
    """In a batch with every need, and not in an empty one."""
    method = next(one for one in map(algorithms.get, algorithms.names()) if name in one.needs)
    found, (known, value) = case(1, method), value_of(name)
    need = need_of(name)
    assert need is NEEDS[known]
    nothing = batch_of(np.ones((N, L)), np.zeros(N), np.zeros((N, L)), np.zeros(N)).replace(old_logp=None)
    assert need.of(nothing, value) is None
    if known != "feedback":
        assert need.of(found.batch, value).shape[0] == N
    if need.by_outputs:
        assert found.outputs.extras is not None
        assert need.by_outputs in found.outputs.extras


def test_an_unknown_need_is_refused_with_the_nearest() -> None:
    for read in (need_of, value_of):
        with pytest.raises(InputError, match="unknown need 'old_log': did you mean 'old_logp'"):
            read("old_log")
    with pytest.raises(InputError, match="the need 'values:two' has the value 'two', which is not a number"):
        need_of("values:two")
    assert values_of({"values:2", "tempered_logp:0.5", "old_logp"}, "tempered_logp") == [0.5]
