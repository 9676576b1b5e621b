"""What the step of one token alone would do, in a second-order model of the last layer (CAPO, 2510.00819).

h is the last hidden state f32[d], pi the next-token distribution f32[V], a the action, A its advantage,
v = onehot(a) - pi; the gradient of the unembedding is g = A v h^T. The step direction is G, and u = G h.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import is_off
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import Transform, stateless

Number = float | jax.Array


def head_gradient(h: jax.Array, pi: jax.Array, action: jax.Array | int, A: Number) -> jax.Array:
    """g = A (onehot(a) - pi) h^T, f32[V, d]."""
    return A * jnp.outer(jax.nn.one_hot(action, pi.shape[0]) - pi, h)


def adam_direction(
    g: jax.Array,
    first: jax.Array,
    second: jax.Array,
    steps: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    epsilon: Number = 1e-8,
) -> jax.Array:
    """The step that Adam with these moments, after so many steps, would take for g alone; shape of g."""
    m = (b1 * first + (1 - b1) * g) / (1 - b1 ** (steps + 1))
    s = (b2 * second + (1 - b2) * g**2) / (1 - b2 ** (steps + 1))
    return m / (jnp.sqrt(s) + epsilon)


def step_effect(
    h: jax.Array, pi: jax.Array, action: jax.Array | int, A: Number, direction: jax.Array, learning_rate: Number
) -> tuple[jax.Array, jax.Array]:
    """Predicted change of the objective and predicted KL of the step lr G, f32[] each:

    m_H = lr <g, G> + lr^2/2 A ((v.u)^2 - u^T (diag(pi) - pi pi^T) u),  m_F = lr^2/2 (v.u)^2.
    """
    v, u = jax.nn.one_hot(action, pi.shape[0]) - pi, direction @ h
    curvature = A * ((v @ u) ** 2 - (jnp.sum(pi * u**2) - (pi @ u) ** 2))
    slope = jnp.sum(head_gradient(h, pi, action, A) * direction)
    return learning_rate * slope + 0.5 * learning_rate**2 * curvature, 0.5 * learning_rate**2 * (v @ u) ** 2


def gradient_step_effect(
    p: jax.Array, squares: jax.Array, cubes: jax.Array, h_square: jax.Array, A: jax.Array, learning_rate: Number
) -> tuple[jax.Array, jax.Array]:
    """`step_effect` of a plain gradient step, G = g, in closed form; elementwise.

    p = pi(a), squares = sum pi^2, cubes = sum pi^3, h_square = |h|^2. As u = A |h|^2 v:
    v.v = 1 - 2 p + squares, sum pi v^2 = p - 2 p^2 + cubes, pi.v = p - squares.
    """
    v_square = 1 - 2 * p + squares
    spread = p - 2 * p**2 + cubes - (p - squares) ** 2
    curvature = A**3 * h_square**2 * (v_square**2 - spread)
    slope = A**2 * h_square * v_square
    kl = 0.5 * (learning_rate * A * h_square * v_square) ** 2
    return learning_rate * slope + 0.5 * learning_rate**2 * curvature, kl


def keep_small_steps(
    learning_rate: Number, change_limit: Number, kl_limit: Number, symmetric: bool = True
) -> Transform:
    """Drop (weight 0) tokens whose `gradient_step_effect` reaches a limit; a limit known to be 0 is switched off.

    symmetric: |m_H| < change_limit, else 0 <= m_H < change_limit.
    """
    check_number("learning_rate", learning_rate, above=0)
    check_number("change_limit", change_limit, least=0)
    check_number("kl_limit", kl_limit, least=0)
    inputs = ("squared_probability", "cubed_probability", "hidden_square")

    def drop(batch: Trajectories) -> Trajectories:
        mask = batch.loss_weights != 0
        squares, cubes, h_square = (jnp.where(mask, batch.need(name), 0.0) for name in inputs)
        p, A = jnp.exp(jnp.where(mask, batch.need("old_logp"), 0.0)), batch.need("advantages")
        change, kl = gradient_step_effect(p, squares, cubes, h_square, A, learning_rate)
        kept = mask
        if not is_off(change_limit):
            kept &= (jnp.abs(change) < change_limit) & (symmetric | (change >= 0))
        if not is_off(kl_limit):
            kept &= kl < kl_limit
        return batch.replace(weights=jnp.where(kept, batch.loss_weights, 0.0))

    return stateless(drop, needs={"old_logp", *inputs})
