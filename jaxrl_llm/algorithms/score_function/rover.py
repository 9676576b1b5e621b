"""Random Policy Valuation (ROVER)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scale
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, PAPER, NonNegative
from jaxrl_llm.objectives.regression import random_policy_regression


@method(
    paper="arXiv 2509.24981", year=2025, test="test_regression_methods.py::test_rover_by_loop_with_other_tokens_between"
)
def rover(
    ratio_scale: Annotated[float, PAPER] = 1.0,
    next_scale: Annotated[NonNegative, PAPER] = 1.0,
    scale: Annotated[Scale, PAPER] = "none",
    epsilon: Annotated[NonNegative, CODE] = 1e-6,
) -> Algorithm:
    """Random Policy Valuation (ROVER).

    With binary rewards at the end, acting greedily on the value of the uniform policy is optimal. The log-ratio is
    interpreted as that value and trained by one-step regression with a uniform backup:

        Q_t = rho_T (log pi - log pi_behaviour),  V_t = mean over the vocabulary of the same
        loss = token mean of (Q_t - sg(r_c + next_scale V_next(t)))^2,  r_c = r - mean_g

    rho_T = ratio_scale; V_next(t) is V at the row's next action, 0 after the last. scale "std" divides r_c by the
    group's standard deviation plus epsilon (the mathematics script). No clip, no KL. Groups of equal rewards still
    contribute. On-policy the first gradient is twice that of REINFORCE with the group's mean as baseline.
    """
    check_number("ratio_scale", ratio_scale, above=0)
    return Algorithm(group_relative(scale, epsilon=epsilon), random_policy_regression(ratio_scale, next_scale))
