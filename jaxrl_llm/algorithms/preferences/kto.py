from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import NonNegative, Paper, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import mismatched_kl, verdicts
from jaxrl_llm.rollouts.guidance.responses import judged_completions


@method(paper="arXiv 2402.01306", test="test_offline_preferences.py::test_kto_by_loop")
@run_settings(*given_responses(1))
def kto(
    beta: Paper[Positive] = 0.1,
    desirable_weight: Paper[NonNegative] = 1.0,
    undesirable_weight: Paper[NonNegative] = 1.0,
    kl: Paper[bool] = True,
) -> Algorithm:
    """Kahneman-Tversky Optimization (KTO).

    The column label of a row says whether its completion is good. With u the log-ratio of the whole completion to the
    reference, its loss is

        w_D (1 - sigmoid(beta (u - z)))  of good,   w_U (1 - sigmoid(beta (z - u)))  of bad completions

    with w_D = desirable_weight and w_U = undesirable_weight; its mean over rows is minimised. z = max(0, mean of u')
    has no gradient: an estimate of KL(pi || reference) from u' of each prompt with the next completion of the step
    that belongs to another one. kl: false takes z = 0, TRL's apo_zero_unpaired (2408.06266). Choose w_D n_D / (w_U
    n_U) from 1 to 4/3, n the numbers of good and bad rows.
    """
    before = chain(mismatched_kl()) if kl else chain()
    objective = verdicts(beta, desirable_weight, undesirable_weight, kl=kl)
    return Algorithm(before, objective, rollout=judged_completions(mismatched=kl))
