from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import CODE, NonNegative, Number, Scale, ZeroOrOne
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.parts import Trajectories, part
from jaxrl_llm.objectives import by_sign, gamma, log_probability, policy_gradient, sequence_ratio, token_mean
from jaxrl_llm.objectives.off_policy import importance_weight, mismatch
from jaxrl_llm.objectives.weights import of_scaled_ratio


@method(paper="arXiv 2602.10693", test="test_sequence_level.py::test_vespo_is_the_loop")
def vespo(
    positive_power: Annotated[float, CODE] = 2.0,
    positive_decay: Annotated[float, CODE] = 3.0,
    negative_power: Annotated[float, CODE] = 3.0,
    negative_decay: Annotated[float, CODE] = 2.0,
    correction: Annotated[Literal["none", "truncate", "mask"], CODE] = "none",
    cap: Annotated[float, CODE] = 2.0,
    scale: Annotated[Scale, CODE] = "std",
    ddof: Annotated[ZeroOrOne, CODE] = 1,
    epsilon: Annotated[NonNegative, CODE] = 1e-6,
) -> Algorithm:
    """Variational Sequence-Level Soft Policy Optimization (VESPO).

    Replaces the clip by a smooth weight of the sequence's full ratio W_i = prod_t rho_it, not length-normalised:

        phi(W) = W^k exp(lambda (1 - W)),   loss = -1/T sum_i sum_t sg(phi(W_i)) A_i logp_it

    T the tokens of the batch; (k, lambda) = (positive_power, positive_decay) where A >= 0, else (negative_power,
    negative_decay). phi(1) = 1, and phi is maximal at k / lambda. A as in `grpo` (scale, ddof, epsilon).

    correction "none": W is the ratio of current to behaviour policy. "truncate" and "mask": W is the ratio of current
    to old policy times the product of the tokens' weights w of old to behaviour policy, as min(w, cap), or as w where
    w <= cap and 1e-8 elsewhere. W is at least 1e-8.
    """
    weight = by_sign(gamma(positive_power, positive_decay), gamma(negative_power, negative_decay))
    ratio = sequence_ratio("behaviour" if correction == "none" else "old", mean=False)
    if correction != "none":
        weight = of_scaled_ratio(weight, mismatch_of_sequence(correction, cap))
    objective = policy_gradient(ratio, log_probability(weight), token_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)


@part
def mismatch_of_sequence(correction: Literal["truncate", "mask"], cap: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: `sequence_factor` of the batch."""
    return lambda batch: sequence_factor(batch, correction, cap)


def sequence_factor(
    batch: Trajectories, mode: Literal["truncate", "mask"] = "truncate", high: Number = 2.0, low: Number = 0.0
) -> jax.Array:
    """prod_t u_t of each row on each of its tokens, f32[N, L], u_t the token's `importance_weight`, at least 1e-8.

    A single rejected token therefore almost removes its sequence. Clipped to exp(+-LARGEST).
    """
    counts = batch.loss_weights != 0
    u = jnp.log(jnp.maximum(importance_weight(mismatch(batch), counts, "token", mode, low, high), 1e-8))
    total = jnp.sum(jnp.where(counts, u, 0.0), axis=1, keepdims=True)
    return jnp.broadcast_to(jnp.exp(jnp.clip(total, -LARGEST, LARGEST)), counts.shape)
