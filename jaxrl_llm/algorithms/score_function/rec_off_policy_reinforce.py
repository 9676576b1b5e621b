"""REC/REP/RED: off-policy REINFORCE (Group-Relative REINFORCE Is Off-Policy)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.balance import balanced_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Clipping, Scale
from jaxrl_llm.core.hyperparameters import CODE, PAPER, NonNegative, Positive
from jaxrl_llm.objectives import kl, log_probability, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.penalties import imitation
from jaxrl_llm.objectives.regression import masked_score
from jaxrl_llm.utils.errors import is_off, require_choice


@method(paper="arXiv 2509.24203", year=2025, test="test_regression_methods.py::test_rec_by_loop")
def rec_off_policy_reinforce(
    clip: Annotated[Clipping, PAPER] = "one-side",
    weight: Annotated[Literal["advantage", "importance", "none"], PAPER] = "none",
    regulariser: Annotated[Literal["none", "forward-kl", "k2"], PAPER] = "none",
    drop: Annotated[Literal["none", "balance"], PAPER] = "none",
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    far_low: Annotated[float, CODE] = 0.6,
    far_high: Annotated[float, CODE] = 2.0,
    temperature: Annotated[Positive, CODE] = 1.0,
    coefficient: Annotated[NonNegative, CODE] = 0.1,
    scale: Annotated[Scale, PAPER] = "none",
    epsilon: Annotated[NonNegative, CODE] = 1e-6,
) -> Algorithm:
    """REC/REP/RED: off-policy REINFORCE (Group-Relative REINFORCE Is Off-Policy).

    A = r - mean_g (scale "std": over the population standard deviation + epsilon), rho = sg(pi / pi_behaviour), and

        loss = token mean of -sg(A W M) log pi + regulariser

    clip: M is 1 everywhere ("none"), where PPO does not clip ("one-side"), where 1 - clip_low <= rho <= 1 + clip_high
    ("two-side"), or "ring", also where A >= 0, rho <= 1 - far_low or A <= 0, rho >= 1 + far_high. weight: W = 1
    ("none"), rho ("importance") or exp(A / temperature) ("advantage", RED-Weight; its exponent is bounded at 20).
    regulariser, not masked by M: "none", "forward-kl" -c log pi (AsymRE) or "k2" c (log pi - log pi_behaviour)^2
    (OPMD), c = coefficient. drop "balance" (RED-Drop): random bad samples are dropped until they do not outnumber the
    good ones, r >= mean, in their group; statistics are over the kept samples; dropped ones have A = 0 but still count
    in the token mean.

    Members: REINFORCE ("none", "none", "none"); GRPO ("one-side", "importance", scale "std"); REC-OneSide, REC-TwoSide
    and REC-Ring with weight "none" or "importance"; `opmd`; `asymre`. The wider range clip_low 0.6, clip_high 2 learns
    faster. In a group of one A is 0 (released code: r).
    """
    require_choice("regulariser", regulariser, ("none", "forward-kl", "k2"))
    require_choice("drop", drop, ("none", "balance"))
    score = masked_score(clip, weight, clip_low, clip_high, far_low, far_high, temperature)
    objective = policy_gradient(token_ratio(), log_probability(score), token_mean())
    if regulariser != "none" and not is_off(coefficient):
        # 2 c k2 = c l^2
        objective += coefficient * (imitation() if regulariser == "forward-kl" else 2.0 * kl("behaviour", "k2"))
    advantages = balanced_relative if drop == "balance" else group_relative
    return Algorithm(advantages(scale, ddof=0, epsilon=epsilon), objective)
