from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, NonNegative, Scale, ZeroOrOne


@method(paper="arXiv 2506.02864", test="test_group_relative.py::test_bnpo_worked_example_in_two_slices")
@beside("beta", "the paper's normalisation of rewards by a Beta distribution", "another normalisation")
def bnpo(
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.0,
    scale: Code[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-4,
) -> Algorithm:
    """Local-batch token mean (TRL's loss type "bnpo"; the name is of Beta Normalization).

    GRPO with token losses averaged over the tokens of each micro-batch, then over micro-batches. With one sequence per
    micro-batch that is GRPO's average, with a single micro-batch DAPO's: the result depends on how the batch is split,
    so it is for comparison only. The paper of that name normalises rewards by a Beta distribution, which is not done
    here. clip_low, clip_high, kl_coefficient, scale, ddof and epsilon as in grpo, with TRL's values.
    """
    return grpo(clip_low, clip_high, kl_coefficient, scale=scale, ddof=ddof, epsilon=epsilon, average="slice")
