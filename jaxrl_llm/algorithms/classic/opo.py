from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.classic.reinforce import averaged_gradient
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Paper
from jaxrl_llm.objectives import log_probability
from jaxrl_llm.rewards.transforms import row_lengths


@method(paper="arXiv 2505.23585", test="test_score_function.py::test_opo_worked_example_and_loop")
def opo(average: Paper[AverageName] = "sum") -> Algorithm:
    """On-Policy RL with Optimal reward baseline (OPO).

    The constant baseline of minimal variance is E[|grad log pi|^2 r] / E[|grad log pi|^2]. If token gradients are
    orthogonal and of equal norm, the squared norm of a response's gradient is proportional to its length:

        b_g = sum_i |o_i| r_i / sum_i |o_i|,    A_i = r_i - b_g,    loss = -1/N sum_i A_i sum_t log pi(a_t)

    One update per batch, no KL, no entropy bonus. Since sum_i |o_i| A_i = 0, an average that weights all tokens equally
    ("sum", or verl's "token") balances positive and negative tokens; "sequence" does not. In a group of one the formula
    gives advantage 0; verl has b = 0 there.
    """
    transform = group_relative(scale="none", baseline="weighted", weights=row_lengths)
    return Algorithm(transform, averaged_gradient(log_probability(), average))
