from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Scale, ZeroOrOne
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, sequence_ratio


@method(paper="arXiv 2507.18071", test="test_sequence_level.py::test_gspo_is_the_loop")
def gspo(
    clip_low: Paper[NonNegative] = 3e-4,
    clip_high: Paper[NonNegative] = 4e-4,
    scale: Paper[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Group Sequence Policy Optimization (GSPO).

    Ratio and clip are at the sequence level, like the reward: a response is kept or clipped as a whole. With GRPO's A_i
    (scale, ddof, epsilon) and s_i = exp(1/|o_i| sum_t (logp - logp_behaviour)),

        loss = -1/N sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    s is a geometric mean, hence close to 1, so clip_low and clip_high are about a thousandth of GRPO's. No KL. verl
    clamps the log-ratio from above at 10.
    """
    objective = policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)
