from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.classic.reinforce import averaged_gradient
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Code, NonNegative
from jaxrl_llm.objectives import clip


@method(paper="arXiv 2602.02710", test="test_sets.py::test_maxrl_is_the_loop")
def maxrl(
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    average: Code[AverageName] = "token",
) -> Algorithm:
    """Maximum Likelihood Reinforcement Learning (MaxRL).

    Maximises log p(success) = -sum_k (1 - p)^k / k instead of p; a group of N samples gives a truncated series:

        A_i = (r_i - mean_g) / (mean_g + epsilon)

    for non-negative rewards; the advantage of a rare success is up to N - 1. A group of one, and one whose mean is not
    positive, has advantage 0. Since groups without a success contribute nothing, the expected gradient is that of the
    series up to N - 1, (1 - (1 - p)^(N-1)) / p times grad p; the paper's estimator without the control variate has N.
    The loss is PPO's clip (clip_low, clip_high), which on-policy has the policy gradient, averaged by `average`
    ("token" in the public forks).
    """
    objective = averaged_gradient(clip(clip_low, clip_high), average)
    return Algorithm(group_relative(scale="mean", epsilon=epsilon), objective)
