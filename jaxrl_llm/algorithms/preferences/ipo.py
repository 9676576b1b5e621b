from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import Code, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.objectives import loss_named, pairwise
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected


@method(paper="arXiv 2310.12036", test="test_offline_preferences.py::test_ipo_by_loop")
@run_settings(*given_responses(2))
def ipo(beta: Code[Positive] = 0.1) -> Algorithm:
    """Identity Preference Optimization (IPO).

    The columns chosen and rejected of a row are two responses to its prompt. With u the log-ratio of a whole response
    to the reference and n its number of tokens,

        loss = mean over pairs of (u_chosen/n_chosen - u_rejected/n_rejected - 1/(2 beta))^2

    beta is the paper's tau, which prints the loss without n; its authors and TRL divide.
    """
    return Algorithm(chain(), pairwise(loss_named("ipo"), beta), rollout=chosen_and_rejected())
