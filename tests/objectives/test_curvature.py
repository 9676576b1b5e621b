"""The second-order model of one token's step: full arrays, and the closed form of a plain gradient step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.policy_loss.capo_curvature import gradient_step_effect
from jaxrl_llm.models.outputs.readings import adam_step
from jaxrl_llm.models.vocabulary import Distribution

H, PI, ACTION = jnp.array([0.5, -1.0]), jnp.array([0.7, 0.2, 0.1]), 1


def head_gradient(h: jax.Array, pi: jax.Array, action: int, A: float) -> jax.Array:
    """g = A (onehot(a) - pi) h^T, f32[V, d]."""
    return A * jnp.outer(jax.nn.one_hot(action, pi.shape[0]) - pi, h)


def step_effect(
    h: jax.Array, pi: jax.Array, action: int, A: float, direction: jax.Array, learning_rate: float
) -> tuple[jax.Array, jax.Array]:
    """m_H and m_F of any step, from full arrays."""
    v, u = jax.nn.one_hot(action, pi.shape[0]) - pi, direction @ h
    curvature = A * ((v @ u) ** 2 - u @ (jnp.diag(pi) - jnp.outer(pi, pi)) @ u)
    slope = jnp.sum(head_gradient(h, pi, action, A) * direction)
    return learning_rate * slope + 0.5 * learning_rate**2 * curvature, 0.5 * learning_rate**2 * (v @ u) ** 2


def closed(A: float, learning_rate: float) -> tuple[float, float]:
    p, squares, cubes, h_square, a = (jnp.float32(x) for x in (0.2, 0.54, 0.352, 1.25, A))
    change, kl = gradient_step_effect(p, squares, cubes, h_square, a, learning_rate)
    return float(change), float(kl)


@pytest.mark.parametrize(
    ("A", "learning_rate", "change", "kl"),
    [(1.0, 0.1, 0.149869, 0.010153), (-1.0, 0.1, 0.135131, 0.010153), (1.0, 0.001, 0.001426, 0.000001)],
)
def test_worked_example_of_a_gradient_step(A: float, learning_rate: float, change: float, kl: float) -> None:
    assert closed(A, learning_rate) == pytest.approx((change, kl), abs=1e-6)
    full = step_effect(H, PI, ACTION, A, head_gradient(H, PI, ACTION, A), learning_rate)
    assert tuple(map(float, full)) == pytest.approx(closed(A, learning_rate), rel=1e-5)


def test_worked_example_of_adams_first_step() -> None:
    """At zero moments G is the sign of g: u = [-1.5, 1.5, -1.5]."""
    W = jnp.log(PI)[:, None] * H / jnp.sum(H**2)
    source = Distribution(H[None], W, jnp.ones(1))
    moments = {"first": jnp.zeros((3, 2)), "second": jnp.zeros((3, 2)), "count": jnp.int32(0)}
    betas = jnp.float32(0.9), jnp.float32(0.999), jnp.float32(1e-8)
    for block in (2, 1024):
        slope, spread = map(float, adam_step(source, jnp.array([ACTION]), jnp.ones(1), moments, betas, block)[0])
        change, kl = 0.001 * slope + 0.5e-6 * (slope**2 - spread), 0.5e-6 * slope**2
        assert slope**2 - spread == pytest.approx(4.32, abs=1e-4)
        assert (change, kl) == pytest.approx((0.002402, 0.000003), abs=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_closed_form_is_that_of_full_arrays(seed: int) -> None:
    random = np.random.default_rng(seed)
    h, pi = jnp.asarray(random.normal(size=5), jnp.float32), jnp.asarray(random.dirichlet(np.ones(7)), jnp.float32)
    A, rate = float(random.normal()), 0.3
    full = step_effect(h, pi, 3, A, head_gradient(h, pi, 3, A), rate)
    found = gradient_step_effect(pi[3], jnp.sum(pi**2), jnp.sum(pi**3), jnp.sum(h**2), jnp.float32(A), rate)
    np.testing.assert_allclose(found, full, rtol=1e-4, atol=1e-6)


def test_the_first_order_term_is_the_change_of_the_objective() -> None:
    """A log pi(a) after a small step of the unembedding, by automatic differentiation."""
    W, h = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2)), jnp.float32), H
    pi = jax.nn.softmax(W @ h)
    by = jax.grad(lambda W: 0.7 * jax.nn.log_softmax(W @ h)[ACTION])(W)
    np.testing.assert_allclose(by, head_gradient(h, pi, ACTION, 0.7), atol=1e-6)
