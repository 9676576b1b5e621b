from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Scale, ZeroOrOne
from jaxrl_llm.objectives import geometric_clip, policy_gradient, regularised, sequence_mean, token_ratio


@method(paper="arXiv 2507.20673", test="test_sequence_level.py::test_gmpo_is_the_loop")
def gmpo(
    clip_low: Paper[NonNegative] = 0.4,
    clip_high: Paper[NonNegative] = 0.4,
    kl_coefficient: Paper[NonNegative] = 0.0,
    scale: Paper[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Geometric-Mean Policy Optimization (GMPO).

    The geometric mean of token ratios, each clipped in log space before the mean (GSPO clips after it):

        d'_t = min(d_t, clip_high) where A > 0, max(d_t, -clip_low) where A < 0,   d = logp - logp_behaviour
        loss = -1/N sum_i A_i exp(1/|o_i| sum_t d'_t)

    clip_low and clip_high bound log-ratios, not ratios 1 +- e. A as in `grpo` (scale, ddof, epsilon); kl_coefficient
    scales the sequence mean of k3 (TRL). verl divides by |o_i| + 1e-8 and counts rows without actions in N.
    """
    average = sequence_mean()
    objective = policy_gradient(token_ratio(), geometric_clip(clip_low, clip_high), average)
    objective = regularised(objective, average, kl_coefficient=kl_coefficient)
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)
