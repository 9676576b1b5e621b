from dataclasses import replace

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Code, Count, NonNegative, OfRun, Ours, Paper
from jaxrl_llm.rollouts.guidance.hints import beginnings
from jaxrl_llm.rollouts.guidance.repair import retried, succeeds


@method(
    paper="arXiv 2507.10628", test="test_own_rollouts.py::test_ghpo_shows_more_of_the_solution_until_a_sample_is_right"
)
def ghpo(
    stages: Paper[int] = 3,
    hints_from: Code[int] = 0,
    column: Ours[str] = "solution",
    success: Code[float] = 0.0,
    accuracy: Ours[str | None] = None,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.0,
    epsilon: Code[NonNegative] = 1e-4,
    average: Ours[AverageName] = "token",
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Guided Hybrid Policy Optimization (GHPO).

    A group in which no sample succeeds (reward > success; accuracy: this component of it) is sampled again under the
    prompt q* = q + the first i/(stages + 1) of the characters of a known solution (a column of the data set), for
    i = 1 ... stages until a sample succeeds; after the last stage the group is used as it is. With stages 3 these are
    25, 50 and 75 %. The last group replaces the others, and A_i = (r_i - mean_g)/(std_g + epsilon), its ratios and

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    are under the prompt that it was sampled under. hints_from: the first step with hints (paper: about 20; released
    configuration: 0). kl_coefficient: of k3 to the reference. The released code uses the loss of GRPO or of BNPO by its
    configuration; average "token" is BNPO's with one micro-batch, "sequence" GRPO's, "constant" divides by max_length.
    The hint's words are ours. The paper adds half a format reward: name the other component as `accuracy`.
    """
    base = grpo(clip_low, clip_high, kl_coefficient, epsilon=epsilon, average=average, max_length=max_length)
    return replace(base, rollout=retried(beginnings(column, stages), succeeds(success, accuracy), start=hints_from))
