"""Difficulty Adaptive Rollout Sampling (DARS: Depth-Breadth Synergy in RLVR)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.group import drop_rows, group_relative, uniform_groups
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.second_stage import topped_up
from jaxrl_llm.utils.errors import require_choice


@method(
    paper="arXiv 2508.13755",
    year=2025,
    test="test_own_rollouts.py::test_dars_samples_more_of_a_prompt_the_fewer_are_right",
)
def dars(
    rule: Annotated[Literal["equal", "hard"], CODE] = "equal",
    most_samples: Annotated[int | None, CODE] = None,
    scale: Annotated[Literal["none", "std"], CODE] = "none",
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
) -> Algorithm:
    """Difficulty Adaptive Rollout Sampling (DARS: Depth-Breadth Synergy in RLVR).

    The sizes of a prompt's N advantages add up to N S, S = 2 a (1 - a) at the accuracy a, so that hard prompts count
    less. Prompts with a < 0.5 therefore get a second stage of samples,

        rule "equal"  ceil((N/2 - N S) / S) more, up to the peak of N S        (the paper's ET)
        rule "hard"   ceil(((1 - a) N - N S) / S) more, harder ones beyond it  (HW)

    a is 0.5/N if no sample is right, and a prompt has at most most_samples (None: 32 for "equal", 64 for "hard").
    scale "std" divides the advantages by the standard deviation, and takes S = 2 sqrt(a (1 - a)) and the peak N. Over
    both stages, A_i = r_i - mean_g, without prompts that are all right or all wrong, in PPO's clipped loss (clip_low,
    clip_high), mean over tokens. DARS-B, the large breadth, is a setting of the run: many prompts_per_step, one
    minibatch, 2 epochs.
    """
    require_choice("scale", scale, ("none", "std"))
    return Algorithm(
        chain(drop_rows(uniform_groups), group_relative(scale)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
        rollout=topped_up(most_samples or (64 if rule == "hard" else 32), rule, scale == "std"),
    )
