from jaxrl_llm.advantages import drop_uniform_groups, group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, run_settings, several_steps
from jaxrl_llm.core.annotations import NonNegative, Ours, Paper, ZeroOrOne
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import by_sign, clipped, log_probability, policy_gradient, token_mean, token_ratio


@method(paper="arXiv 2602.00983", test="test_weighted.py::test_dispo_is_the_loop_over_groups_that_differ")
@run_settings(several_steps("several gradient steps on a batch: at the first all ratios are 1"))
def dispo(
    positive_low: Paper[float] = 0.2,
    positive_high: Paper[float] = 10.0,
    negative_low: Paper[float] = 1.0,
    negative_high: Paper[float] = 100.0,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Decoupled Importance-Sampling Weight Clipping (DISPO).

    CISPO with separate bounds for correct and wrong responses: w = clip(rho, 1 - positive_low, 1 + positive_high) where
    A > 0, clip(rho, 1 - negative_low, 1 + negative_high) where A < 0,

        loss = -1/T sum_i sum_t sg(w_it) A_i logp_it,   A_i = (r_i - mean_g) / (std_g + epsilon)

    over the T tokens of groups whose rewards differ. The paper does not say which standard deviation (ddof).
    """
    weight = by_sign(clipped(positive_low, positive_high), clipped(negative_low, negative_high))
    objective = policy_gradient(token_ratio(), log_probability(weight), token_mean())
    return Algorithm(chain(drop_uniform_groups(), group_relative(ddof=ddof, epsilon=epsilon)), objective)
