"""Adaptive Policy Optimization over modes (APO, A2FM)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER
from jaxrl_llm.core.ranges import NonNegative
from jaxrl_llm.rollouts.thinking_modes import tagged


@method(
    paper="arXiv 2510.12838",
    year=2025,
    test="test_prefixed.py::test_apo_worked_example",
    beside={"routing": ("the first stage, supervised training of the modes", "training before the run")},
)
def a2fm_apo(
    tags: Annotated[str, OURS] = "<instant>,<reasoning>",
    forced: Annotated[int, CODE] = 2,
    alpha: Annotated[NonNegative, PAPER] = 2.0,
    easy: Annotated[float, CODE] = 0.5,
    by: Annotated[Literal["first", "all"], CODE] = "first",
    agentic: Annotated[str, OURS] = "<agentic>",
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.0,
) -> Algorithm:
    """Adaptive Policy Optimization over modes (APO, A2FM).

    The policy first writes the tag of a mode, such as to answer at once or to reason. A group has `forced` samples of
    each mode, whose tag is given and masked out of the loss, and free ones, which write the tag. With r_acc the score
    of the response, r_fmt = 1 if it begins with exactly one of the `tags`, else 0, and p the success rate of the forced
    samples (score > 0.5), of the first tag's mode (by "first") or of all (by "all"),

        R = r_acc r_fmt r_adaptive,    r_adaptive = 1 - p^alpha for a free sample in another mode than the first,
                                       if the question is easy: p >= easy; else 1
        A = (R - mean)/(std + 1e-6)    over the whole group, population std

    and GRPO's clipped loss (clip_low, clip_high; kl_coefficient times k3) on the policy's own tokens. Which forced
    samples define p, and when a question is easy, is an open point of the description; the figure of the released
    repository counts those of the instant mode, and calls 1/2 easy. Its rewards of 0.8 are illustrative: the formula
    gives 0.75.

    The first tag is the cheapest mode. The group has group_size samples, more than forced times the number of modes.
    Runs with --tools or --environment have one mode more, of the tag `agentic`, and their samples are episodes, whose
    first reply has the tag. Observations are masked. The templates of the modes were not available to us: here an
    episode whose first reply has one tag has r_fmt = 1 if it goes on after that reply, as after a call of a tool, in
    the agentic mode and in no other. The supervised stage before, which teaches the policy the tags, is not included.
    """
    plain = grpo(clip_low, clip_high, kl_coefficient, ddof=0)
    return replace(plain, rollout=tagged(tags, forced, alpha, easy, by, agentic=agentic))
