from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.algorithms.score_function.rec_off_policy_reinforce import rec_off_policy_reinforce
from jaxrl_llm.core.annotations import Code, NonNegative, Paper, Scale


@method(paper="arXiv 2501.12599", test="test_regression_methods.py::test_rec_worked_example")
def opmd(coefficient: Code[NonNegative] = 0.1, scale: Paper[Scale] = "none") -> Algorithm:
    """Online Policy Mirror Descent (Kimi k1.5), as a member of REC (arXiv 2509.24203).

    loss = token mean of -A log pi + c (log pi - log pi_behaviour)^2, A = r - mean_g, c = coefficient. No ratio, no
    clip: the square keeps the policy near the behaviour policy. scale "std" divides A by the population standard
    deviation. Kimi k1.5 squares the log-ratio of the whole sequence, with a weight tau/2 that it does not print; REC
    squares that of each token.
    """
    return rec_off_policy_reinforce(clip="none", regulariser="k2", coefficient=coefficient, scale=scale)
