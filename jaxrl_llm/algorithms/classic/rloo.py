from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import kl_reward, on_actions
from jaxrl_llm.advantages.group import above_baseline, standardised
from jaxrl_llm.advantages.returns import terminal_rewards
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper
from jaxrl_llm.core.parts import Array, Trajectories, Transform, batch_part, chain
from jaxrl_llm.objectives import policy_gradient, sequence_mean, sequence_ratio, sequence_sum, token_mean, token_ratio
from jaxrl_llm.objectives.surrogates import clip, log_probability
from jaxrl_llm.utils.errors import is_off


@batch_part
def leave_one_out(batch: Trajectories, normalise: bool, epsilon: float) -> Array:
    """A function `batch -> f32[N]`: the total reward, score and token rewards, minus the mean of the group's others."""
    R = jnp.where(jnp.isnan(batch.scores), jnp.nan, jnp.sum(terminal_rewards(batch), axis=1))
    A = above_baseline(R, batch.group, "leave_one_out")
    return standardised(jnp.where(jnp.isnan(R), jnp.nan, A), epsilon=epsilon) if normalise else A


@method(paper="arXiv 2402.14740", test="test_score_function.py::test_rloo_is_the_loop")
def rloo(
    kl_coefficient: Paper[NonNegative] = 0.03,
    loss: Paper[Literal["policy_gradient", "sequence_clip", "token_clip"]] = "policy_gradient",
    clip_range: Code[float] = 0.2,
    normalise: Paper[bool] = False,
    epsilon: Code[NonNegative] = 1e-4,
) -> Algorithm:
    """REINFORCE Leave-One-Out (Back to Basics: Revisiting REINFORCE Style Optimization).

    The baseline is the mean reward of the prompt's other responses, which is unbiased. A whole response is one action.

        R_i = r_i - kl_coefficient sum_t (logp_behaviour - logp_ref),    A_i = R_i - 1/(G-1) sum_{j != i} R_j
        loss = -1/N sum_i A_i sum_t log pi(a_t)

    loss: "policy_gradient" is the paper's; "sequence_clip" is TRL's, mean -min(A S, A clip(S, 1 - e, 1 + e)) with
    e = clip_range and S the product of the response's token ratios; "token_clip" is verl's, with token ratios and a
    token mean. normalise: (A - mean) / (std + epsilon) over the batch (an option of TRL). TRL's kl_coefficient is 0.05.
    The advantage of a group of one is 0 (verl's loop version: its reward).
    """
    clipped = clip(clip_range, clip_range)
    objective = {
        "policy_gradient": policy_gradient(token_ratio(), log_probability(), sequence_sum()),
        "sequence_clip": policy_gradient(sequence_ratio(mean=False), clipped, sequence_mean()),
        "token_clip": policy_gradient(token_ratio(), clipped, token_mean()),
    }[loss]

    return Algorithm(with_kl_reward(kl_coefficient, on_actions(leave_one_out(normalise, epsilon))), objective)


def with_kl_reward(coefficient: float, *rest: Transform) -> Transform:
    """Chain the transforms, after a per-token penalty on the log-ratio to the reference unless the coefficient is 0."""
    return chain(*rest) if is_off(coefficient) else chain(kl_reward(coefficient), *rest)
