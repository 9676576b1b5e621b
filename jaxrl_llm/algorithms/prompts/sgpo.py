"""Sorted Group Policy Optimization (sGPO: Trading Inference FLOPs)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, PAPER, NonNegative
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import least_tried
from jaxrl_llm.curriculum.stages import sorted_by_profile


@method(paper="arXiv 2606.08854", year=2026, test="test_curricula.py::test_the_worked_example_of_sgpo")
def sgpo(
    stage_steps: Annotated[int, OURS] = 100,
    profile: Annotated[str, OURS] = "",
    profile_samples: Annotated[int, PAPER] = 8,
    trivial: Annotated[float, PAPER] = 0.75,
    unsolved_share: Annotated[float, PAPER] = 0.1,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.0,
) -> Algorithm:
    """Sorted Group Policy Optimization (sGPO: Trading Inference FLOPs).

    A profile of each prompt's success rate p before training decides which prompts are used, how many samples each
    gets, and in which order: p > trivial is dropped, of p = 0 a random share unsolved_share is kept, and

        G = 2 where p > 1/4,    4 where 1/8 < p <= 1/4,    8 where 0 < p <= 1/8,

    about the group that has one success. The prompts with G = 2 are trained on first, for stage_steps steps, then those
    with 4, then those with 8; the unsolved ones that are kept belong to each stage. Credit and loss are GRPO's
    (clip_low, clip_high, kl_coefficient) with the population standard deviation, so that A is 1 or -1 in a mixed pair.

    profile: the column of the data set with p; if empty, the first pass over the prompts measures it, with
    profile_samples samples each, and trains as GRPO does meanwhile. The run's group_size must be profile_samples; steps
    with smaller groups have more of them. The paper trains each stage to convergence.
    """
    rule = sorted_by_profile(stage_steps, profile or None, profile_samples, trivial, unsolved_share)
    base = grpo(clip_low, clip_high, kl_coefficient, ddof=0)
    return replace(base, curriculum=choose_prompts(rule, least_tried()))
