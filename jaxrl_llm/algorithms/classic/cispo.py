from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Scale, ZeroOrOne
from jaxrl_llm.objectives import clipped, log_probability, policy_gradient, token_mean, token_ratio


@method(paper="arXiv 2506.13585", test="test_weighted.py::test_cispo_is_the_loop")
def cispo(
    clip_low: Paper[NonNegative] = 1.0,
    clip_high: Code[NonNegative] = 4.0,
    scale: Paper[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Clipped IS-Weight Policy Optimization (MiniMax-M1).

    The clipped ratio is a weight under stop-gradient, so that no token loses its gradient:

        loss = -1/T sum_i sum_t sg(clip(rho, 1 - clip_low, 1 + clip_high)) A_i logp_it

    over the T tokens of the batch, A as in `grpo` (scale, ddof, epsilon). The paper has no effective lower bound, which
    is clip_low = 1, and does not print clip_high; 4 gives the cap of 5 in TRL's settings for ScaleRL (2510.13786).
    TRL's epsilon_high is the cap itself; verl's is clip_high, and its default clip_low of 0.2 is an effective bound.
    """
    objective = policy_gradient(token_ratio(), log_probability(clipped(clip_low, clip_high)), token_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)
