from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import BelowHalf, Code, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import chosen_likelihood, loss_named, pairwise
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected


@method(paper="arXiv 2405.14734", test="test_offline_preferences.py::test_simpo_by_loop")
@run_settings(*given_responses(2))
def simpo(
    beta: Paper[Positive] = 2.5,
    gamma: Paper[NonNegative] = 1.375,
    label_smoothing: Code[BelowHalf] = 0.0,
    alpha: Ours[float] = 0.0,
    likelihood: Code[NonNegative] = 0.0,
) -> Algorithm:
    """Simple Preference Optimization (SimPO).

    The columns chosen and rejected of a row are two responses to its prompt; there is no reference. With a the mean
    log-probability of a response's tokens,

        loss = mean over pairs of -log sigmoid(beta (a_chosen - a_rejected) - gamma) + likelihood nll

    alpha: not 0 takes (1 - exp(-alpha a)) / alpha in place of a (AlphaPO, 2501.03884: 0.25, with gamma 0.1). nll: nats
    a token of the chosen responses (CPO-SimPO: 1). label_smoothing: the share of pairs that may be swapped.
    """
    loss = loss_named("simpo", label_smoothing, gamma=gamma, alpha=alpha)
    objective = pairwise(loss, beta, against=None, per_token=True) + likelihood * chosen_likelihood()
    return Algorithm(chain(), objective, rollout=chosen_and_rejected())
