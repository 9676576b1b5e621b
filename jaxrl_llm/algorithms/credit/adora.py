"""Advantage Dynamics via Online Rollout Adaptation (ADORA)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.difficulty import EDGES, RULES, weigh_advantages
from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.reward_rules import weight_of_promise
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName, Rule
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, RUN, AtLeastOne, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.utils.errors import require_choice


@method(paper="arXiv 2602.10019", year=2026, test="test_shaped_reward.py::test_adora_against_a_loop")
def adora(
    rule: Annotated[Rule, CODE] = "length",
    weight: Annotated[float, CODE] = 1.0,
    other_weight: Annotated[float, CODE] = 0.1,
    success: Annotated[float, OURS] = 0.5,
    hard: Annotated[float, PAPER] = 0.5,
    edges: Annotated[Literal["lenient", "strict"], CODE] = "strict",
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.001,
    average: Annotated[AverageName, CODE] = "token",
    max_length: Annotated[AtLeastOne | None, RUN] = None,
) -> Algorithm:
    """Advantage Dynamics via Online Rollout Adaptation (ADORA).

    Multiplies GRPO's advantages by `weight` for prompts that satisfy a rule in this batch, by `other_weight` for the
    others. rule: "length", the longest correct sample (reward > success) is longer than the mean wrong one;
    "difficulty", at most the share `hard` of the samples is correct; "or" and "and" of both. Wrong samples that are
    truncated, or have max_length tokens (4054 where None), are ignored. edges, for groups without a correct sample or a
    wrong one that is not ignored: "strict" is the released code for text, "lenient" that for images
    (`difficulty.length_gain`).

    The code has the length rule with weights 1 and 0.1. According to reviews of the paper this is its choice for
    images; for text it combines both rules, in an unspecified way, with weights 2 and 1. The code's rewards need
    success 1.01. The rest is GRPO with clip_low, clip_high, kl_coefficient and average (the code for images has
    "sequence").
    """
    check_number("other_weight", other_weight, least=0)
    require_choice("rule", rule, RULES)
    require_choice("edges", edges, EDGES)
    longest = 4054.0 if max_length is None else max_length

    transform = chain(
        group_relative(), weigh_advantages(weight_of_promise(rule, weight, other_weight, success, hard, edges, longest))
    )
    return Algorithm(
        transform,
        grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average).objective,
    )
