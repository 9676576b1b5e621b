from typing import Literal

from jaxrl_llm.advantages import group_relative, whiten_advantages
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Ours, Paper
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import clipped_policy, kl, token_mean


@method(paper="arXiv 2501.03262", test="test_critic_free.py::test_reinforce_plus_plus_baseline_is_the_loop")
def reinforce_plus_plus_baseline(
    kl_coefficient: Ours[NonNegative] = 0.001,
    over: Paper[Literal["sequences", "tokens"]] = "sequences",
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    epsilon: Code[NonNegative] = 1e-8,
) -> Algorithm:
    """REINFORCE++ with a group baseline (REINFORCE++).

    GRPO with the standard deviation of the batch in place of the group's, which is not biased by difficulty:

        A'_i = r_i - mean_g,    A_i = (A'_i - mean A') / sqrt(var A' + epsilon)

    in PPO's clipped loss (clip_low, clip_high), mean over tokens, plus kl_coefficient times 1/2 (logp - logp_ref)^2.
    over: "sequences" takes mean and std over responses, as in the paper; "tokens" over their tokens, as in verl, so
    that longer responses have more weight and a prompt's advantages no longer have mean 0. The paper divides by
    std + epsilon.
    """
    average = token_mean()
    objective = clipped_policy(clip_low, clip_high, average)
    objective += kl_coefficient * kl(to="reference", estimator="k2", average=average)
    return Algorithm(chain(group_relative("none"), whiten_advantages(over, epsilon=epsilon)), objective)
