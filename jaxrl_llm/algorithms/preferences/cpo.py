from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import BelowHalf, Code, NonNegative, Paper, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import chosen_likelihood, loss_named, pairwise
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected


@method(paper="arXiv 2401.08417", test="test_offline_preferences.py::test_cpo_by_loop")
@run_settings(*given_responses(2))
def cpo(
    beta: Paper[Positive] = 0.1, likelihood: Paper[NonNegative] = 1.0, label_smoothing: Code[BelowHalf] = 0.0
) -> Algorithm:
    """Contrastive Preference Optimization (CPO).

    The columns chosen and rejected of a row are two responses to its prompt; there is no reference:

        loss = mean over pairs of -log sigmoid(beta (log pi(chosen) - log pi(rejected))) + likelihood nll

    of whole responses; nll: nats a token of the chosen ones. label_smoothing: the share of pairs that may be swapped.
    """
    objective = pairwise(loss_named("sigmoid", label_smoothing), beta, against=None) + likelihood * chosen_likelihood()
    return Algorithm(chain(), objective, rollout=chosen_and_rejected())
