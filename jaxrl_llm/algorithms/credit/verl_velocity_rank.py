"""Velocity-Exploiting Rank-Learning (VERL)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.rank import rank_bonus
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.hyperparameters import CODE, PAPER, Fraction, NonNegative
from jaxrl_llm.core.transform import chain


@method(paper="arXiv 2509.23808", year=2025, test="test_token_credit.py::test_verl_against_a_loop")
def verl_velocity_rank(
    gain: Annotated[NonNegative, CODE] = 2.0,
    coefficient: Annotated[NonNegative, CODE] = 1.0,
    rate: Annotated[Fraction, CODE] = 0.3,
    kappa: Annotated[NonNegative, CODE] = 2.0,
    place: Annotated[Literal["all", "last"], PAPER] = "all",
    start: Annotated[Literal["first", "zero"], CODE] = "zero",
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.001,
    entropy_coefficient: Annotated[NonNegative, CODE] = 0.001,
    average: Annotated[AverageName, CODE] = "token",
) -> Algorithm:
    """Velocity-Exploiting Rank-Learning (VERL).

    Adds a bonus computed from a response's hidden states: their effective rank ER, its growth along the response (ERV),
    and the growth of that growth (ERA). With mu the running means over batches (mu <- (1 - rate) mu + rate batch mean),
    d = clip((x - mu) / (|mu| + 1e-8), -5, 5) and phi = tanh(d),

        b = sigmoid(gain d_ERA);  Phi = coefficient (b phi_ER + (1 - b) phi_ERV)
        A' = A_grpo + min(relu(Phi), |A_grpo| / kappa)

    without a bonus at the first step. place: on "all" tokens, as in the formula, or the "last", as in the released
    code. start: running means start at "zero", as in the code, which makes the first d large, or at the "first"
    batch's. The rest is GRPO with clip_low, clip_high, kl_coefficient (k3), entropy_coefficient and average (the code
    has a token mean). Measures: `effective_rank.rank_measures`.
    """
    objective = grpo(
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coefficient=kl_coefficient,
        entropy_coefficient=entropy_coefficient,
        average=average,
    ).objective
    return Algorithm(chain(group_relative(), rank_bonus(gain, coefficient, rate, kappa, place, start)), objective)
