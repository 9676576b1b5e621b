from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, NonNegative, OfRun, Paper
from jaxrl_llm.objectives import clipped_policy, constant


@method(paper="arXiv 2503.20783", test="test_group_relative.py::test_dr_grpo_is_the_loop")
def dr_grpo(
    clip_low: Paper[NonNegative] = 0.2, clip_high: Paper[NonNegative] = 0.2, max_length: OfRun[Count | None] = None
) -> Algorithm:
    """GRPO Done Right (Understanding R1-Zero-Like Training).

    GRPO without its two biases: A_i = r_i - mean_g is not divided by the standard deviation, and the sum over a
    sequence of tokens is divided by a constant instead of by its length:

        loss = -1/N sum_i 1/max_length sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    max_length: the generation budget (None: the paper's 3000). No KL. Older code divided the sum over the batch by the
    length alone, or used the width of the padded batch. G / (G - 1) times A would be RLOO's; the learning rate absorbs
    it.
    """
    mean = constant(3000 if max_length is None else max_length)
    return Algorithm(group_relative("none"), clipped_policy(clip_low, clip_high, mean))
