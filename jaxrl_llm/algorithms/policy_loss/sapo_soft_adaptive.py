from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Positive, Scale, ZeroOrOne
from jaxrl_llm.objectives import policy_gradient, sequence_mean, soft_gate, token_ratio


@method(paper="arXiv 2511.20347", test="test_weighted.py::test_sapo_is_the_loop")
def sapo_soft_adaptive(
    positive_temperature: Paper[Positive] = 1.0,
    negative_temperature: Paper[Positive] = 1.05,
    scale: Paper[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """Soft Adaptive Policy Optimization (SAPO).

    Replaces the clip of the token's ratio by a sigmoid gate, with tau = positive_temperature where A > 0, else
    negative_temperature, which is higher so that negative gradients decay faster off-policy:

        loss = -1/N sum_i 1/|o_i| sum_t (4 / tau) sigmoid(tau (rho - 1)) A_i

    At rho = 1 the gradient is GRPO's, with its A (scale, ddof, epsilon), and the gate is 2 / tau. No KL.
    """
    objective = policy_gradient(token_ratio(), soft_gate(positive_temperature, negative_temperature), sequence_mean())
    return Algorithm(group_relative(scale, ddof=ddof, epsilon=epsilon), objective)
