"""Methods with references other than the initial policy, against loops in double precision."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, gradient_of, loss_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.regularisation.salsa import listed_models, salsa
from jaxrl_llm.algorithms.regularisation.tscac import constrained_weights, tscac
from jaxrl_llm.utils.errors import InputError


def test_salsa_is_ppo_with_the_soup_as_reference() -> None:
    """The same transform and objective; only where reference_logp comes from differs."""
    batch, logp = random_batch(3, values=np.random.default_rng(0).normal(size=(11, 6)))
    values = jnp.zeros((11, 6))
    soup, plain = salsa("a, b", share=0.2), get("ppo")
    assert dataclasses.replace(plain, reference=soup.reference).needs == soup.needs
    assert loss_of(soup, batch, logp, values=values) == loss_of(plain, batch, logp, values=values)
    assert soup.reference is not None
    assert soup.reference.models == ("a", "b")
    found = soup.reference.init({"w": jnp.ones(3)}, [{"w": jnp.full(3, 2.0)}, {"w": jnp.full(3, 4.0)}])
    np.testing.assert_allclose(found["w"], 0.2 + 0.4 * 2 + 0.4 * 4, rtol=1e-6)
    with pytest.raises(InputError, match=r"share is 1\.5"):
        salsa(share=1.5)


def test_tscac_worked_example() -> None:
    """pi_1 = [.2, .1], pi_2 = [.3, .4], beta = [.25, .2], A = [1, -1], lambda = [.5, .5]."""
    mixed = 0.5 * np.log([[0.2], [0.1]]) + 0.5 * np.log([[0.3], [0.4]])
    batch = batch_of(np.ones((2, 1)), [1.0, 0.0], np.log([[0.25], [0.2]]), reference_logp=mixed)
    found = constrained_weights(1.0, 10.0)(batch.replace(advantages=jnp.asarray([[1.0], [-1.0]])))
    np.testing.assert_allclose(found[:, 0], [2.663361, 0.367879], rtol=1e-5)


def test_tscac_is_its_loop() -> None:
    random = np.random.default_rng(1)
    values = random.normal(size=(11, 6))
    batch, logp = random_batch(5, values=values)
    new = random.normal(size=(11, 6))
    algorithm = tscac(multiplier=0.7, cap=3.0, value_coefficient=0.5, gamma=0.9, lam=0.8)
    mask, N = np.asarray(batch.action_mask), 11
    old, reference = np.asarray(batch.old_logp, np.float64), np.asarray(batch.reference_logp, np.float64)
    policy, critic, weights = 0.0, 0.0, np.zeros(mask.shape)
    for i in range(N):
        A = after = 0.0
        places = list(np.flatnonzero(mask[i]))
        for t in reversed(places):
            r = float(batch.reward[i]) if t == places[-1] else 0.0
            A = r + 0.9 * after - values[i, t] + 0.9 * 0.8 * A
            after = values[i, t]
            weights[i, t] = min(np.exp(reference[i, t] - old[i, t] + A / 0.7), 3.0)
            policy -= weights[i, t] * logp[i, t] / mask.sum()
            critic += 0.5 * (new[i, t] - (A + values[i, t])) ** 2 / mask.sum()
    np.testing.assert_allclose(prepared(algorithm, batch).advantages, weights, rtol=1e-4)
    np.testing.assert_allclose(loss_of(algorithm, batch, logp, values=new), policy + 0.5 * critic, rtol=1e-4)
    np.testing.assert_allclose(
        gradient_of(algorithm, batch, logp, values=new), -weights / mask.sum(), rtol=1e-4, atol=1e-7
    )


def test_names_are_separated_by_commas() -> None:
    assert listed_models(" a,,b ") == ["a", "b"]
    assert listed_models(None) == []
