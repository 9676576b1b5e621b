"""Balanced Policy Optimization with Adaptive Clipping (BAPO)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import PAPER, Fraction, Positive
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.clips.adaptive_clip import controlled_clip, find_bounds


@method(paper="arXiv 2510.18927", year=2025, test="test_trust_region.py::test_bapo_by_loop")
@presets(
    paper={"target": 0.4, "low_end": 0.9, "low_step": 0.02, "high_end": 3.0,
           "order": "high_first", "criterion": "share", "weighted": True, "dual_clip": None},
    code={"target": 1.0, "low_end": 0.8, "low_step": 0.05, "high_end": 2.0,
          "order": "low_first", "criterion": "ratio", "weighted": False, "dual_clip": 3.0},
)  # fmt: skip
def bapo_adaptive_clip(
    target: Annotated[float, PAPER] = 0.4,
    low_start: Annotated[float, PAPER] = 0.6,
    low_end: Annotated[float, PAPER] = 0.9,
    low_step: Annotated[Fraction, PAPER] = 0.02,
    high_start: Annotated[float, PAPER] = 1.2,
    high_end: Annotated[float, PAPER] = 3.0,
    high_step: Annotated[Positive, PAPER] = 0.05,
    order: Annotated[Literal["high_first", "low_first"], PAPER] = "high_first",
    criterion: Annotated[Literal["ratio", "share"], PAPER] = "share",
    statistic: Annotated[Literal["gradient", "value"], PAPER] = "value",
    weighted: Annotated[bool, PAPER] = True,
    dual_clip: Annotated[float | None, PAPER] = None,
) -> Algorithm:
    """Balanced Policy Optimization with Adaptive Clipping (BAPO).

    loss = token mean of -min(rho A, clip(rho, c_low, c_high) A), with ratio bounds searched at each gradient step: from
    low_start and high_start up, in steps of low_step and high_step, to at most low_end and high_end, until the tokens
    with A > 0 contribute a share of at least `target` to sum q |min(rho A, clip(rho, c_low, c_high) A)|, q the token's
    probability under the behaviour policy. A is GRPO's.

    Where the paper (v1, section 5.1 and algorithm 1; the defaults) and the released code (preset "code") differ: order
    "high_first" raises c_high to its end, then c_low by one step; the code's "low_first" raises c_low to its end, then
    c_high. The code's criterion is "ratio", of positive to negative contributions, without q (weighted False), with
    target 1, bounds 0.6 to 0.8 and 1.2 to 2, and both steps 0.05; its README gives the paper's target as 0.5. Only the
    code bounds the loss of bad actions by dual_clip |A|, with dual_clip = 3 (None: no bound).

    With statistic "value", the formula of both, raising c_low increases the contribution of bad tokens, away from the
    target, so only c_high helps. "gradient" counts rho |A| of the tokens that are not clipped, which matches the
    paper's stated purpose.
    """
    rho = token_ratio()
    bounds = (low_start, low_end, low_step), (high_start, high_end, high_step)
    search = find_bounds(rho, target, *bounds, order, criterion, statistic, weighted)
    return Algorithm(group_relative(), policy_gradient(rho, controlled_clip(dual_clip), token_mean(), refresh=search))
