"""Two iterations of every method of the catalogue on a tiny task: all is finite, and parameters stay so."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from heavy import few

from jaxrl_llm import algorithms
from jaxrl_llm.core.needs import asks_for, values_of
from jaxrl_llm.in_jax.lab.laboratory import lacking
from jaxrl_llm.in_jax.tasks import sequence_lock
from jaxrl_llm.in_jax.train import LABORATORY, LabSettings, fresh_params, make_train, task_provides
from jaxrl_llm.models.policy import Params

TINY = LabSettings(iterations=2, prompts=2, group_size=4, hidden=16, layers=1, exact=False)
TASK = sequence_lock(1, 2)


def in_the_laboratory(method: algorithms.Algorithm) -> bool:
    """Others have references of several models, of which the laboratory has one, train reward models, or need the
    bounds of masked-diffusion models or the codes of prompts of their own."""
    rule = method.reference
    moves = rule is None or (rule.update is not None and isinstance(rule.init({}, ()), dict))
    others = values_of(method.needs, "scores") or values_of(method.needs, "elbo_terms")
    return moves and not others and not asks_for(method.needs, "code")


OF_ONE_MODEL = [name for name in algorithms.names() if in_the_laboratory(algorithms.get(name))]
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def start() -> Params:
    """Parameters for all methods: a fifth of each program would make them."""
    return fresh_params(jax.random.key(1), TASK, TINY)


@pytest.mark.heavy
@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("name", few(OF_ONE_MODEL, ("ppo",)))
def test_two_iterations_are_finite(name: str, start: Params) -> None:
    without = [part for part in lacking(name, TASK) if part not in task_provides(TASK)]
    train = make_train(TASK, name, TINY, without=without)
    compiled = jax.jit(lambda key, start: train(key, LABORATORY.get(name), start), compiler_options=UNOPTIMISED)
    run = compiled(jax.random.key(0), start)
    for metric, values in run.metrics.items():
        assert np.isfinite(values).all(), metric
    np.testing.assert_array_equal(run.metrics["finite"], 1.0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.params))
