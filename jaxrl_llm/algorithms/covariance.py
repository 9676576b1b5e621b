"""Methods that limit tokens by the covariance of their log-probability and advantage."""

from __future__ import annotations

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import (
    policy_gradient,
    token_mean,
    token_ratio,
)
from jaxrl_llm.objectives.covariance import (
    clip_and_detach,
    count_batches,
    draw_covariant,
    mark_covariant,
    penalise_covariant,
)

__all__ = ["clip_cov", "kl_cov"]


def clip_cov(
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Clip-Cov (The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617, 2025).

    Entropy falls with the covariance of log-probability and advantage, which is dominated by few tokens. With
    cov = (A - mean A)(log pi - mean log pi) over all n tokens, max(1, floor(share n)) tokens are detached, chosen at
    random among those with covariance_low < cov < covariance_high that are not clipped:

        loss = token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), 0 for detached tokens

    Detached tokens count in the mean. A is GRPO's, with ddof and epsilon. The covariance is over the whole batch of a
    gradient step at the current parameters (the released code: over a micro-batch).

    Defaults. Paper: share, covariance_low, covariance_high. Code: clip_low, clip_high, ddof, epsilon.
    """
    rho = token_ratio()
    draw = draw_covariant(rho, covariance_low, covariance_high, share, clip_low, clip_high)
    objective = policy_gradient(rho, clip_and_detach(clip_low, clip_high), token_mean(), refresh=draw)
    return Algorithm(chain(group_relative(ddof=ddof, epsilon=epsilon), count_batches()), objective)


def kl_cov(share: float = 2e-4, kl_coefficient: float = 1.0, ddof: int = 1, epsilon: float = 1e-6) -> Algorithm:
    """KL-Cov (The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617, 2025).

    No clip: loss = token mean of -rho A, plus beta |log pi - log pi_old| on the max(1, floor(share n)) of n
    tokens with the highest covariance (A - mean A)(log pi - mean log pi) in the batch. beta = kl_coefficient (verl's
    YAML has 0.1); the paper's 7B runs have share 2e-3. A is GRPO's, with ddof and epsilon. At the first update of a
    batch the penalty has no gradient.

    Defaults. Code: kl_coefficient, ddof, epsilon, share.
    """
    objective = policy_gradient(
        token_ratio(),
        penalise_covariant(kl_coefficient),
        token_mean(),
        refresh=mark_covariant(share),
        needs={"old_logp"},
    )
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective)
