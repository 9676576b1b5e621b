import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, Ours, Paper, Routing
from jaxrl_llm.core.parts import Array, Trajectories
from jaxrl_llm.objectives import capped, log_probability, policy_gradient, product, sequence_sum, token_ratio, within
from jaxrl_llm.objectives.off_policy import mismatch
from jaxrl_llm.objectives.weights import of_scaled_ratio


@method(paper="arXiv 2512.01374", test="test_mismatch.py::test_minirl_is_the_loop")
def minirl(
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.27,
    cap: Paper[float] = 5.0,
    routing: Ours[Routing] = "rollout",
) -> Algorithm:
    """MiniRL (Stabilizing Reinforcement Learning with LLMs).

    GRPO reduced to a first-order approximation of the sequence-level objective: A_i = R_i - mean_g, the full ratio
    w = pi / pi_behaviour = (pi_old / pi_behaviour) (pi / pi_old), no division by length or standard deviation:

        loss = -1/N sum_i sum_t M_it sg(min(w_it, cap)) A_i logp_it

    M is 0 where PPO would clip r = pi / pi_old: A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. Equation 7
    prints w without the cap; the text truncates at 5.

    Of a mixture of experts updates replay the experts that tokens were sampled with (routing "rollout", R3, also for
    pi_old), or those that pi_old "recompute"s (R2, for the update only); routers go on to weigh them, and to learn. The
    paper found none best with one update a batch, R2 with two, and R3 with four or more. Other models have no routing.
    """
    weight = product(within(clip_low, clip_high), of_scaled_ratio(capped(cap), mismatch_ratio))
    objective = policy_gradient(token_ratio("old"), log_probability(weight), sequence_sum())
    return Algorithm(group_relative("none"), objective, routing=routing)


def mismatch_ratio(batch: Trajectories) -> Array:
    """pi_old / pi_behaviour of each token, f32[N, L]."""
    return jnp.exp(mismatch(batch))
