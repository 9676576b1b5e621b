from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import BelowHalf, Code, Count, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.objectives import chosen_likelihood, loss_named, pairwise
from jaxrl_llm.objectives.preference.losses import PairLoss
from jaxrl_llm.rollouts.pairs import best_and_worst_of


@method(paper="arXiv 2402.04792", test="test_online_preferences.py::test_dpo_online_by_loop")
def dpo_online(
    loss: Paper[str | PairLoss] = "sigmoid",
    beta: Code[Positive] = 0.1,
    label_smoothing: Code[BelowHalf | None] = None,
    likelihood: Ours[NonNegative] = 0.0,
    reset: Ours[Count | None] = None,
) -> Algorithm:
    """Online and iterated Direct Preference Optimization (OAIF).

    The policy samples the responses that it learns from: of each group the best and the worst by the run's rewards,
    which may be a judge's (`--rollout judged_pairs --rewards judge`), are the chosen and the rejected one. With u the
    log-ratio of a whole response to the reference

        loss = mean over pairs of -log sigmoid(beta (u_chosen - u_rejected)) + likelihood nll

    A group of equal rewards has no pair. loss, label_smoothing, nll: as in `dpo`. reset: the reference becomes the
    policy after every so many updates, so that the run is rounds of DPO; None: it is the initial one, as in the paper.
    The paper draws two responses (--group-size 2).
    """
    chosen = loss_named(loss, label_smoothing) if isinstance(loss, str) else loss
    return Algorithm(
        chain(), pairwise(chosen, beta) + likelihood * chosen_likelihood(), rollout=best_and_worst_of(),
        reference=None if reset is None else periodic_reset(reset),
    )  # fmt: skip
