"""V_0: A Generalist Value Model for Any Policy at State Zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.neighbours import samples_by_neighbours
from jaxrl_llm.curriculum.scores import least_tried


@method(
    paper="arXiv 2602.03584",
    year=2026,
    test="test_curricula.py::test_v0_is_a_kernel_average_by_loop",
    lacks={
        "value_model": (
            "a pretrained model of values that reads other prompts' results; these are averaged over prompts with "
            "alike words",
            "a value model of prompts",
        )
    },
)
def v0_value(
    allocation: Annotated[Literal["variance", "target"], OURS] = "variance",
    context: Annotated[int, OURS] = 256,
    kernel_width: Annotated[float, OURS] = 0.2,
    threshold: Annotated[float, CODE] = 0.5,
    mixed_target: Annotated[float, OURS] = 0.9,
    least_samples: Annotated[int, OURS] = 2,
    most_samples: Annotated[int, OURS] = 32,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.0,
) -> Algorithm:
    """V_0: A Generalist Value Model for Any Policy at State Zero.

    Predicts the policy's success rate p on a prompt before it is sampled, from the outcomes of the last `context`
    prompts, and divides a step's samples by it. The labels are 1 where the mean reward was at least `threshold`.

        p(x) = (1/2 + sum_j k(x, x_j) z_j) / (1 + sum_j k(x, x_j)),    k = exp((cos(x, x_j) - 1) / kernel_width)

    with the cosine of counts of words and pairs of words. allocation "variance" gives samples in proportion to
    p (1 - p); "target" the smallest group that has right and wrong samples with probability mixed_target. Each prompt
    gets from least_samples to most_samples, and all of them the step's total. Credit and loss are GRPO's (clip_low,
    clip_high, kl_coefficient).

    The paper's predictor is a pretrained tabular network over text embeddings, an external model; the kernel average
    has its interface. The paper's rule for the allocation was not available: both rules are ours.
    """
    budget = samples_by_neighbours(
        allocation, context, kernel_width, threshold, mixed_target, least_samples, most_samples
    )
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=choose_prompts(least_tried(), budget))
