"""Submodular Policy Optimization (SubPO; Submodular Reinforcement Learning)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.reward_to_go import gains_to_come
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.hyperparameters import RECALLED
from jaxrl_llm.objectives.averaging.averages import average_by_name
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import log_probability


@method(
    paper="arXiv 2307.13372",
    year=2023,
    test="test_reward_composed.py::test_subpo_is_the_loop",
    needs={"spans": "gains of single parts; without them the score is the only gain"},
)
def subpo(average: Annotated[AverageName, RECALLED] = "sum") -> Algorithm:
    """Submodular Policy Optimization (SubPO; Submodular Reinforcement Learning).

    The reward of a trajectory is a set function F of what it visits, with diminishing returns; each step earns what it
    adds, F(S and s) - F(S), which depends on all before it. REINFORCE with the gains still to come:

        loss = -1/N sum_i sum_t (sum_{j >= t} gain_j - b_t) log pi(a_t)

    Gains are the rewards of spans of the completion, each where its span ends: `--rewards 'coverage(COLUMN)'` gives 1/n
    for the first mention of each of n items of a column of the data set. b_t is the mean of the gains still to come of
    the prompt's other samples at the same token number, 0 where they have ended. The score, if there is one, is a gain
    of the last token. With an additive F this is REINFORCE with rewards to go. The paper leaves b open. average: see
    `average_by_name`.
    """
    objective = policy_gradient(token_ratio(), log_probability(), average_by_name(average))
    return Algorithm(gains_to_come(), objective)
