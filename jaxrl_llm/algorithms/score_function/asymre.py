from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.algorithms.score_function.rec_off_policy_reinforce import rec_off_policy_reinforce
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Scale


@method(paper="arXiv 2506.20520", test="test_regression_methods.py::test_rec_worked_example")
def asymre(coefficient: Code[NonNegative] = 0.1, scale: Paper[Scale] = "none") -> Algorithm:
    """Asymmetric REINFORCE, as a member of REC (arXiv 2509.24203).

    loss = -token mean of (A + c) log pi, A = r - mean_g: the baseline is lowered by c = coefficient > 0, so that
    off-policy good answers have more weight than bad ones. scale "std" divides A by the population standard deviation.
    """
    return rec_off_policy_reinforce(clip="none", regulariser="forward-kl", coefficient=coefficient, scale=scale)
