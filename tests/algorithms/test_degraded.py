"""Self-supervised preference optimization against a loop, and its versions of a response."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import outputs_of, prepared, random_batch
from method_step import arrays

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.preferences.spo_self_supervised import without_keywords
from jaxrl_llm.core.trajectory import with_totals


def test_spo_self_supervised_by_loop() -> None:
    C, weight, beta = 3, 0.7, 0.4
    batch, logp = random_batch(5, (6, 6))
    reward = np.tile([1.0, 0.0, 0.5, 0.5, 0.5, 0.5], 2)
    degree = np.tile([0.0, 0.0, 1.0, 2.0, 1.0, 2.0], 2)
    batch = batch.replace(reward=jnp.asarray(reward, jnp.float32)).with_info(degree=jnp.asarray(degree, jnp.float32))
    values = np.random.default_rng(2).normal(size=(*logp.shape, C))
    method = algorithms.get("spo_self_supervised", degrees=C, weight=weight, beta=beta)
    x = arrays(batch)
    ready = prepared(method, batch)
    outputs = outputs_of(logp, values=values)
    ready = with_totals(method.objective.refresh(outputs, ready) if method.objective.refresh else ready)

    def found(values: jax.Array, logp: jax.Array) -> jax.Array:
        return method.objective(outputs_of(logp).replace(extras={"values": values}), ready)[0]

    u = beta * ((logp - x.reference) * x.mask).sum(1)
    pairs = np.mean([np.logaddexp(0, u[1] - u[0]), np.logaddexp(0, u[7] - u[6])])
    errors, slope = [], np.zeros(values.shape)
    for row in range(12):
        last = int(np.flatnonzero(x.mask[row]).max())
        z = values[row, last]
        p = np.exp(z) / np.exp(z).sum()
        errors.append(-np.log(p[int(degree[row])]))
        slope[row, last] = weight * (p - (np.arange(C) == degree[row])) / 12
    loss, gradient = jax.value_and_grad(found)(jnp.asarray(values, jnp.float32), jnp.asarray(logp, jnp.float32))
    assert float(loss) == pytest.approx(pairs + weight * np.mean(errors), rel=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


def test_keywords_go_by_degrees() -> None:
    text = "Seven elephants crossed the wide river before sunrise and rested under trees"
    keys = {"Seven", "elephants", "crossed", "river", "before", "sunrise", "rested", "under", "trees"}
    before = set(text.split())
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        left = str(without_keywords(text, share)).split()
        assert set(left) <= before
        assert before - keys <= set(left)
        assert len(keys & set(left)) == 9 - round(share * 9)
        before = set(text.split())
    talk = [{"role": "assistant", "content": text}]
    assert without_keywords(talk, 0.5) == [{"role": "assistant", "content": without_keywords(text, 0.5)}]
