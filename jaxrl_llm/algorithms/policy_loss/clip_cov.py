from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, ZeroOrOne
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.covariance import clip_and_detach, count_batches, draw_covariant


@method(paper="arXiv 2505.22617", test="test_trust_region.py::test_clip_cov_by_loop")
def clip_cov(
    share: Paper[float] = 2e-4,
    covariance_low: Paper[float] = 1.0,
    covariance_high: Paper[float] = 5.0,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Clip-Cov (The Entropy Mechanism of RL for Reasoning Language Models).

    Entropy falls with the covariance of log-probability and advantage, which is dominated by few tokens. With
    cov = (A - mean A)(log pi - mean log pi) over all n tokens, max(1, floor(share n)) tokens are detached, chosen at
    random among those with covariance_low < cov < covariance_high that are not clipped:

        loss = token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), 0 for detached tokens

    Detached tokens count in the mean. A is GRPO's, with ddof and epsilon. The covariance is over the whole batch of a
    gradient step at the current parameters (the released code: over a micro-batch).
    """
    rho = token_ratio()
    draw = draw_covariant(rho, covariance_low, covariance_high, share, clip_low, clip_high)
    objective = policy_gradient(rho, clip_and_detach(clip_low, clip_high), token_mean(), refresh=draw)
    return Algorithm(chain(group_relative(ddof=ddof, epsilon=epsilon), count_batches()), objective)
