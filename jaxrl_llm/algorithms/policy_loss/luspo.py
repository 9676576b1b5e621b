from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Scale, ZeroOrOne
from jaxrl_llm.objectives import clip, policy_gradient, sequence_ratio, sequence_sum


@method(paper="arXiv 2602.05261", test="test_sequence_level.py::test_luspo_is_the_loop")
def luspo(
    clip_low: Paper[NonNegative] = 2e-3,
    clip_high: Paper[NonNegative] = 2.5e-3,
    scale: Paper[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Length-Unbiased Sequence Policy Optimization (LUSPO).

    GSPO with each sequence's term multiplied by its length: tokens of long and short responses have equal weight.
    With GRPO's A_i (scale, ddof, epsilon) and GSPO's s_i,

        loss = -1/N sum_i |o_i| min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The loss is about the mean length times GSPO's, so the learning rate must be lower. TRL counts rows without actions
    in N; they are not counted here.
    """
    objective = policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_sum())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)
