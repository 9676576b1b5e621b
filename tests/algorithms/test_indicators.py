"""Indicators of over-optimised likelihoods against a loop, and the card's worked example."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, outputs_of, prepared, random_batch
from method_step import learn

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.preferences.likelihood_overopt_indicators import indicators


@pytest.mark.heavy
def test_likelihood_overopt_indicators_by_loop() -> None:
    batch, logp = random_batch(5, (2, 2))
    random = np.random.default_rng(1)
    p = np.sort(random.dirichlet(np.ones(9), logp.shape))[..., ::-1]
    batch = batch.with_info(top_tokens=jnp.zeros((*logp.shape, 9)), top_logp=jnp.asarray(np.log(p), jnp.float32))
    method = algorithms.get("likelihood_overopt_indicators", top=3)
    found = learn(method, batch, logp)
    action = np.asarray(batch.action_mask)
    mass = entropy = 0.0
    for row, t in np.argwhere(action):
        mass += sum(p[row, t, :3]) / action.sum()
        entropy -= sum(x * np.log(x) for x in p[row, t, :3]) / action.sum()
    assert found.metrics["indicators/top_mass"] == pytest.approx(mass, rel=1e-5)
    assert found.metrics["indicators/top_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found.loss == pytest.approx(learn(algorithms.get("dpo"), batch, logp).loss, rel=1e-6)


def test_the_worked_example() -> None:
    logp = np.log([[[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]]])
    batch = batch_of(np.ones((1, 1)), np.zeros(1), logp[..., 0], info={"top_logp": logp})
    _, metrics = indicators(3)(outputs_of(logp[..., 0]), prepared(algorithms.get("sft", report_accuracy=False), batch))
    assert float(metrics["indicators/top_mass"]) == pytest.approx(0.8, abs=1e-6)
    assert float(metrics["indicators/top_entropy"]) == pytest.approx(0.898720, abs=1e-5)
