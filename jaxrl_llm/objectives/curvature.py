"""The effect of a single token's gradient step, in a second-order model of the last layer (CAPO, 2510.00819).

h is the last hidden state f32[d], pi the next-token distribution f32[V], a the action, A its advantage and
v = onehot(a) - pi; the gradient of the unembedding is g = A v h^T. A step lr G, with u = G h, changes the objective by
m_H, at a KL divergence m_F between the policies:

    m_H = lr <g, G> + lr^2/2 A ((v.u)^2 - u^T (diag(pi) - pi pi^T) u),  m_F = lr^2/2 (v.u)^2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, stateless
from jaxrl_llm.utils.errors import is_off

Number = float | jax.Array


def gradient_step_effect(
    p: jax.Array, squares: jax.Array, cubes: jax.Array, h_square: jax.Array, A: jax.Array, learning_rate: Number
) -> tuple[jax.Array, jax.Array]:
    """m_H and m_F of a plain gradient step, G = g, in closed form; elementwise.

    p = pi(a), squares = sum pi^2, cubes = sum pi^3, h_square = |h|^2. As u = A |h|^2 v:
    v.v = 1 - 2 p + squares, sum pi v^2 = p - 2 p^2 + cubes, pi.v = p - squares.
    """
    v_square = 1 - 2 * p + squares
    spread = p - 2 * p**2 + cubes - (p - squares) ** 2
    curvature = A**3 * h_square**2 * (v_square**2 - spread)
    slope = A**2 * h_square * v_square
    kl = 0.5 * (learning_rate * A * h_square * v_square) ** 2
    return learning_rate * slope + 0.5 * learning_rate**2 * curvature, kl


@part
def keep_small_steps(
    learning_rate: Number, change_limit: Number, kl_limit: Number, symmetric: bool = True
) -> Transform:
    """Drop (weight 0) tokens whose `gradient_step_effect` reaches a limit; a limit of 0 is off.

    symmetric: keep |m_H| < change_limit, else 0 <= m_H < change_limit.
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
