from typing import Literal

from jaxrl_llm.advantages import drop_small_advantages, group_relative
from jaxrl_llm.algorithms.method import Algorithm, RunSetting, method, run_settings
from jaxrl_llm.core.annotations import Code, NonNegative, Ours, Paper, Scale, Span
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, span_ratio

TWICE = "two passes over a batch, without which it is RLOO"


@method(paper="arXiv 2502.01600", test="test_critic_free.py::test_loop_is_the_loop")
@run_settings(RunSetting("epochs", lambda given: 2, lambda config, given: config.epochs >= 2, TWICE))
def loop(
    clip_range: Paper[float] = 0.1,
    bounds: Paper[Literal["paper", "reciprocal"]] = "paper",
    span: Paper[Span] = "token",
    least_advantage: Code[float] = 0.01,
    scale: Paper[Scale] = "none",
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Leave-One-Out PPO (LOOP: RL for Long-Horizon Interactive LLM Agents).

    PPO without a critic for agents, with a leave-one-out baseline and several epochs over each batch:

        A_k = R_k - 1/(K-1) sum_{j != k} R_j,    loss = -mean_k mean_t min(rho A_k, clip(rho, low, 1 + e) A_k)

    e = clip_range; low is 1 - e (bounds "paper") or 1 / (1 + e) ("reciprocal", the code's, so that e may be above 1).
    span of the ratio: "token", "turn" or "sequence", the latter two as products. Rows with |A| < least_advantage are
    dropped. scale "std" divides by the group's deviation + epsilon (worse in the paper). No KL, no reference policy.
    """
    low = clip_range if bounds == "paper" else clip_range / (1 + clip_range)
    credit = group_relative(scale, epsilon=epsilon, baseline="leave_one_out")
    objective = policy_gradient(span_ratio(span, mean=False), clip(low, clip_range), sequence_mean())
    return Algorithm(chain(credit, drop_small_advantages(least_advantage)), objective)
