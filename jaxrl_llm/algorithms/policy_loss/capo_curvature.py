"""Curvature-Aware Policy Optimization (CAPO).

h is the last hidden state f32[d], pi the next-token distribution f32[V], a the action, A its advantage and
v = onehot(a) - pi; the gradient of the unembedding is g = A v h^T. A step lr G, with u = G h, changes the objective by
m_H, at a KL divergence m_F between the policies:

    m_H = lr <g, G> + lr^2/2 A ((v.u)^2 - u^T (diag(pi) - pi pi^T) u),  m_F = lr^2/2 (v.u)^2.
"""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import NonNegativeNumber, Number, PositiveNumber, Scale
from jaxrl_llm.core.hyperparameters import CODE, PAPER, RUN
from jaxrl_llm.core.ranges import AtLeastOne, NonNegative, Positive
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, row_means, totals_of
from jaxrl_llm.core.transform import Transform, chain, stateless
from jaxrl_llm.objectives import clip, constant, policy_gradient, token_ratio
from jaxrl_llm.utils.errors import is_off, require_choice


def kept_mean(values: jax.Array, batch: Trajectories) -> jax.Array:
    """Mean over all sequences of the mean over their kept tokens; 0 for a sequence without one."""
    return jnp.sum(row_means(values, batch)) / totals_of(batch)["rows"]


@method(
    paper="arXiv 2510.00819",
    year=2025,
    test="test_trust_region.py::test_capo_by_loop",
    lacks={"adam": ("the step model of Adam; a plain gradient step is used", "the optimiser's moments in the loss")},
)
def capo_curvature(
    change_limit: Annotated[float, PAPER] = 0.01,
    kl_limit: Annotated[NonNegative, PAPER] = 1e-4,
    symmetric: Annotated[bool, PAPER] = True,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    average: Annotated[Literal["sequence", "constant"], PAPER] = "sequence",
    scale: Annotated[Scale, CODE] = "none",
    learning_rate: Annotated[Positive | None, RUN] = None,
    max_length: Annotated[AtLeastOne | None, RUN] = None,
) -> Algorithm:
    """Curvature-Aware Policy Optimization (CAPO).

    Masks tokens whose own gradient step, in a second-order model of the last layer, would change the objective or the
    policy too much. A token is kept where |m_H| < change_limit (symmetric; else 0 <= m_H < change_limit) and
    m_F < kl_limit, with

        m_H = lr <g, G> + lr^2/2 H,  m_F = lr^2/2 (v.u)^2

    A limit of 0 is off. The rest is GRPO with A = r - mean_g (scale "std" divides by the deviation), clip_low,
    clip_high and no KL. average "sequence": mean over all sequences of the mean over their kept tokens; "constant":
    divides each sequence by max_length (4096 where None), as in Dr. GRPO, for which the paper has kl_limit 1e-3 or 1e-2
    and change_limit 5e-4.

    Here G = g, a plain gradient step with learning_rate (the paper's 1.5e-5 where None), which has a closed form
    without full distributions. The paper models Adam's step.
    """
    require_choice("average", average, ("sequence", "constant"))
    rate, longest = 1.5e-5 if learning_rate is None else learning_rate, 4096 if max_length is None else max_length

    transform = chain(group_relative(scale), keep_small_steps(rate, change_limit, kl_limit, symmetric))
    mean = kept_mean if average == "sequence" else constant(longest)
    return Algorithm(transform, policy_gradient(token_ratio(), clip(clip_low, clip_high), mean))


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
    learning_rate: PositiveNumber, change_limit: NonNegativeNumber, kl_limit: NonNegativeNumber, symmetric: bool = True
) -> Transform:
    """Drop (weight 0) tokens whose `gradient_step_effect` reaches a limit; a limit of 0 is off.

    symmetric: keep |m_H| < change_limit, else 0 <= m_H < change_limit.
    """
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
