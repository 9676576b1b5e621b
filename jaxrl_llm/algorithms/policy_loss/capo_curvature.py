"""Curvature-Aware Policy Optimization (CAPO).

h is the last hidden state f32[d], pi the next-token distribution f32[V], a the action, A its advantage and
v = onehot(a) - pi; the gradient of the unembedding is g = A v h^T. A step lr G, with u = G h, changes the objective by
m_H, at a KL divergence m_F between the policies:

    m_H = lr <g, G> + lr^2/2 A ((v.u)^2 - u^T (diag(pi) - pi pi^T) u),  m_F = lr^2/2 (v.u)^2.
"""

from dataclasses import replace
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegativeNumber, Number, OfRun, Paper, PositiveNumber, Scale
from jaxrl_llm.core.arguments.ranges import AtLeastOne, Fraction, NonNegative, Positive
from jaxrl_llm.core.parts import Array, Objective, part, stateless_part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, row_means, totals_of
from jaxrl_llm.core.transform import Metrics, chain
from jaxrl_llm.objectives import clipped_policy, constant
from jaxrl_llm.utils.errors import is_off


def kept_mean(values: Array, batch: Trajectories) -> Array:
    """Mean over all sequences of the mean over their kept tokens; 0 for a sequence without one."""
    return jnp.sum(row_means(values, batch)) / totals_of(batch)["rows"]


@method(paper="arXiv 2510.00819", test="test_trust_region.py::test_capo_is_adams_step_by_loop")
def capo_curvature(
    change_limit: Paper[float] = 0.01,
    kl_limit: Paper[NonNegative] = 1e-4,
    symmetric: Paper[bool] = True,
    model: Paper[Literal["adam", "gradient"]] = "adam",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    average: Paper[Literal["sequence", "constant"]] = "sequence",
    scale: Code[Scale] = "none",
    learning_rate: OfRun[Positive | None] = None,
    adam_beta1: OfRun[Fraction | None] = None,
    adam_beta2: OfRun[Fraction | None] = None,
    adam_epsilon: OfRun[Positive | None] = None,
    max_length: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Curvature-Aware Policy Optimization (CAPO).

    Masks tokens whose own step, in a second-order model of the last layer, would change the objective or the policy too
    much. A token is kept where |m_H| < change_limit (symmetric; else 0 <= m_H < change_limit) and m_F < kl_limit, with

        m_H = lr <g, G> + lr^2/2 H,  m_F = lr^2/2 (v.u)^2

    A limit of 0 is off. The rest is GRPO with A = r - mean_g (scale "std" divides by the deviation), clip_low,
    clip_high and no KL. average "sequence": mean over all sequences of the mean over their kept tokens; "constant":
    divides each sequence by max_length (4096 where None), as in Dr. GRPO, for which the paper has kl_limit 1e-3 or 1e-2
    and change_limit 5e-4.

    model "adam": G is the step of Adam from the token's g alone, with the moments P and Q that the run's optimiser has
    of the unembedding after n steps,

        G = (b1 P + (1 - b1) g) / (1 - b1^(n+1)) / (sqrt((b2 Q + (1 - b2) g^2) / (1 - b2^(n+1))) + e)

    with its b1 = adam_beta1, b2 = adam_beta2 and e = adam_epsilon, without clipping and weight decay. It takes some ten
    operations for each token and number of the unembedding, and all weights must learn. The released code keeps moments
    of its own, of few tokens of the vocabulary; where the unembedding is also the embedding, the run's have its
    gradients too. model "gradient": G = g, a plain gradient step, which has a closed form without full distributions.
    learning_rate is the peak of the run's (1.5e-5 where None, as 0.9, 0.999 and 1e-8 of Adam).
    """
    rate = 1.5e-5 if learning_rate is None else learning_rate
    longest = 4096 if max_length is None else max_length
    mean = kept_mean if average == "sequence" else constant(longest)
    objective = clipped_policy(clip_low, clip_high, mean)
    credit = group_relative(scale)
    limits = rate, change_limit, kl_limit, symmetric
    if model == "gradient":
        return Algorithm(chain(credit, keep_small_steps(*limits)), objective)
    b1, b2, least = (
        usual if x is None else x for x, usual in ((adam_beta1, 0.9), (adam_beta2, 0.999), (adam_epsilon, 1e-8))
    )
    return Algorithm(chain(credit, tell_adam(b1, b2, least)), with_small_adam_steps(objective, *limits))


@stateless_part()
def tell_adam(batch: Trajectories, beta1: Number, beta2: Number, epsilon: PositiveNumber) -> Trajectories:
    """Controls by which the need "adam_step" knows the run's Adam."""
    return batch.with_controls(beta1=jnp.float32(beta1), beta2=jnp.float32(beta2), epsilon=jnp.float32(epsilon))


@part
def with_small_adam_steps(
    objective: Objective,
    learning_rate: PositiveNumber,
    change_limit: NonNegativeNumber,
    kl_limit: NonNegativeNumber,
    symmetric: bool = True,
) -> Objective:
    """The objective on tokens whose step of Adam alone reaches no limit, as in `keep_small_steps`; metric "kept"."""

    def masked(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        mask = batch.loss_weights != 0
        slope, spread = jnp.moveaxis((outputs.extras or {})["adam_step"], -1, 0)
        A = jnp.where(mask, batch.need("advantages"), 0.0)
        change = learning_rate * A * slope + 0.5 * learning_rate**2 * A * (slope**2 - spread)
        kept = mask & within_limits(change, 0.5 * (learning_rate * slope) ** 2, change_limit, kl_limit, symmetric)
        loss, metrics = objective.function(outputs, batch.replace(weights=jnp.where(kept, batch.loss_weights, 0.0)))
        share = jnp.sum(jnp.where(kept, batch.loss_weights, 0.0)) / totals_of(batch)["tokens"]
        return loss, {**metrics, "adam_step/kept": share}

    return replace(objective, function=masked, needs=objective.needs | {"adam_step"})


def within_limits(
    change: Array, kl: Array, change_limit: NonNegativeNumber, kl_limit: NonNegativeNumber, symmetric: bool
) -> Array:
    """Whether m_H and m_F reach no limit, elementwise; a limit of 0 is off."""
    kept = jnp.ones(change.shape, bool)
    if not is_off(change_limit):
        kept &= (jnp.abs(change) < change_limit) & (symmetric | (change >= 0))
    return kept if is_off(kl_limit) else kept & (kl < kl_limit)


def gradient_step_effect(
    p: Array, squares: Array, cubes: Array, h_square: Array, A: Array, learning_rate: Number
) -> tuple[Array, Array]:
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


INPUTS = ("squared_probability", "cubed_probability", "hidden_square")


@stateless_part({"old_logp", *INPUTS})
def keep_small_steps(
    batch: Trajectories,
    learning_rate: PositiveNumber,
    change_limit: NonNegativeNumber,
    kl_limit: NonNegativeNumber,
    symmetric: bool = True,
) -> Trajectories:
    """Drop (weight 0) tokens whose `gradient_step_effect` reaches a limit; a limit of 0 is off.

    symmetric: keep |m_H| < change_limit, else 0 <= m_H < change_limit.
    """
    mask = batch.loss_weights != 0
    squares, cubes, h_square = (jnp.where(mask, batch.need(name), 0.0) for name in INPUTS)
    p = jnp.exp(jnp.where(mask, batch.need("old_logp"), 0.0))
    change, kl = gradient_step_effect(p, squares, cubes, h_square, batch.need("advantages"), learning_rate)
    kept = mask & within_limits(change, kl, change_limit, kl_limit, symmetric)
    return batch.replace(weights=jnp.where(kept, batch.loss_weights, 0.0))
