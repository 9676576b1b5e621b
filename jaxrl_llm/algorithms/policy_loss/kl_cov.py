"""KL-Cov (The Entropy Mechanism of RL for Reasoning Language Models)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, NonNegative, ZeroOrOne
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.covariance import mark_covariant, penalise_covariant


@method(paper="arXiv 2505.22617", year=2025, test="test_trust_region.py::test_kl_cov_by_loop")
def kl_cov(
    share: Annotated[float, CODE] = 2e-4,
    kl_coefficient: Annotated[NonNegative, CODE] = 1.0,
    ddof: Annotated[ZeroOrOne, CODE] = 1,
    epsilon: Annotated[NonNegative, CODE] = 1e-6,
) -> Algorithm:
    """KL-Cov (The Entropy Mechanism of RL for Reasoning Language Models).

    No clip: loss = token mean of -rho A, plus beta |log pi - log pi_old| on the max(1, floor(share n)) of n
    tokens with the highest covariance (A - mean A)(log pi - mean log pi) in the batch. beta = kl_coefficient (verl's
    YAML has 0.1); the paper's 7B runs have share 2e-3. A is GRPO's, with ddof and epsilon. At the first update of a
    batch the penalty has no gradient.
    """
    objective = policy_gradient(
        token_ratio(),
        penalise_covariant(kl_coefficient),
        token_mean(),
        refresh=mark_covariant(share),
        needs={"old_logp"},
    )
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective)
