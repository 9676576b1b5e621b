from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import NonNegative, Paper, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import chosen_likelihood, loss_named, pairwise
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected


@method(paper="arXiv 2403.07691", test="test_offline_preferences.py::test_orpo_by_loop")
@run_settings(*given_responses(2))
def orpo(beta: Paper[Positive] = 0.1, likelihood: Paper[NonNegative] = 1.0) -> Algorithm:
    """Odds Ratio Preference Optimization (ORPO).

    The columns chosen and rejected of a row are two responses to its prompt; there is no reference. With a the mean
    log-probability of a response's tokens and odds = exp(a) / (1 - exp(a)),

        loss = likelihood nll - beta mean over pairs of log sigmoid(log odds_chosen - log odds_rejected)

    nll: nats a token of the chosen responses, in TRL of their prompts too. beta is the paper's lambda.
    """
    objective = pairwise(loss_named("orpo"), beta, against=None, per_token=True) + likelihood * chosen_likelihood()
    return Algorithm(chain(), objective, rollout=chosen_and_rejected())
