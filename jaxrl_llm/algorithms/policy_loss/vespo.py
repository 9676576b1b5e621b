from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Number, Scale, ZeroOrOne
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.parts import Array, Trajectories, batch_part
from jaxrl_llm.objectives import by_sign, gamma, log_probability, policy_gradient, sequence_ratio, token_mean
from jaxrl_llm.objectives.off_policy import importance_weight, mismatch
from jaxrl_llm.objectives.weights import of_scaled_ratio


@method(paper="arXiv 2602.10693", test="test_sequence_level.py::test_vespo_is_the_loop")
def vespo(
    positive_power: Code[float] = 2.0,
    positive_decay: Code[float] = 3.0,
    negative_power: Code[float] = 3.0,
    negative_decay: Code[float] = 2.0,
    correction: Code[Literal["none", "truncate", "mask"]] = "none",
    cap: Code[float] = 2.0,
    scale: Code[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
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
        weight = of_scaled_ratio(weight, sequence_factor(correction, cap))
    objective = policy_gradient(ratio, log_probability(weight), token_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)


@batch_part
def sequence_factor(
    batch: Trajectories, mode: Literal["truncate", "mask"] = "truncate", high: Number = 2.0, low: Number = 0.0
) -> Array:
    """A function of the batch: prod_t u_t of each row on its tokens, f32[N, L], u_t >= 1e-8 their `importance_weight`.

    A single rejected token therefore almost removes its sequence. Clipped to exp(+-LARGEST).
    """
    counts = batch.loss_weights != 0
    u = jnp.log(jnp.maximum(importance_weight(mismatch(batch), counts, "token", mode, low, high), 1e-8))
    total = jnp.sum(jnp.where(counts, u, 0.0), axis=1, keepdims=True)
    return jnp.broadcast_to(jnp.exp(jnp.clip(total, -LARGEST, LARGEST)), counts.shape)
