"""Per-action baselines: their alignment with actions, and special cases that equal other methods."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.tokens import logit_energy, scatter_by_action, token_baseline


def test_the_energy_is_the_squared_gradient_by_the_logits() -> None:
    logits = jnp.array([0.3, -1.0, 2.0, 0.5])
    pi = jax.nn.softmax(logits)
    for a in range(4):
        gradient = jax.grad(lambda z, a=a: jax.nn.log_softmax(z)[a])(logits)
        np.testing.assert_allclose(logit_energy(pi[a], jnp.sum(pi**2)), jnp.sum(gradient**2), rtol=1e-5)


def test_values_are_placed_by_how_many_actions_came_before() -> None:
    index = jnp.array([[-1, 0, -1, 1], [0, 1, 2, -1], [-1, -1, -1, -1]])
    placed = scatter_by_action(jnp.arange(12.0).reshape(3, 4), index)
    assert np.asarray(placed).tolist() == [[1, 3, 0, 0], [4, 5, 6, 0], [0, 0, 0, 0]]


def test_where_energy_comes_first_it_is_the_mean_of_those_alive() -> None:
    index = jnp.array([[0, 1, 2], [0, 1, -1], [0, -1, -1], [0, 1, 2]])
    returns = jnp.array([1.0, 0, 0.5, 7])[:, None] * (index >= 0)
    energy = jnp.array([2.0, 0, 0])[None] * (index >= 0)
    keys = jnp.array([3, 3, 3, 8])
    found = token_baseline(returns, energy, index, keys, zero_tail=False)
    expected = np.array([[0.5, 0.5, 1], [0.5, 0.5, 0], [0.5, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert token_baseline(returns, energy, index, keys)[0, 2] == 0
    assert (token_baseline(returns, 0 * energy, index, keys) == 0).all()
