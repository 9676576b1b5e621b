from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Fraction, Ours, Positive, Recalled
from jaxrl_llm.core.outer_loop import extrapolated
from jaxrl_llm.core.parts import chain
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.objectives import loss_named, pairwise
from jaxrl_llm.objectives.preference.losses import PairLoss


@method(paper="arXiv 2410.06293", test="test_outer_loops.py::test_apo_accelerated_by_loop")
def apo_accelerated(
    momentum: Recalled[Fraction] = 0.3,
    round_updates: Ours[int] = 16,
    beta: Recalled[Positive] = 0.1,
    loss: Recalled[str | PairLoss] = "sigmoid",
) -> Algorithm:
    """Accelerated Preference Optimization (APO).

    Rounds of preference optimisation on the policy's own samples, of which the best and the worst of a group by their
    reward are a pair, with the policy at the beginning of the round as the reference (iterative DPO with its beta; loss
    "sppo_hard" is SPPO's). With theta_hat where a round of `round_updates` updates ends, the next one begins at

        theta = theta_hat_t+1 + momentum (theta_hat_t+1 - theta_hat_t)

    which for log-linear policies is pi_hat_t+1 (pi_hat_t+1 / pi_hat_t)^momentum, and is in use for others too; the
    references are these. theta_hat_0 is the first policy. momentum 0 is iterative DPO. The update's formula and the
    defaults are from memory of the paper, which has three rounds.
    """
    chosen = loss_named(loss) if isinstance(loss, str) else loss
    reference, outer = periodic_reset(round_updates), extrapolated(momentum, round_updates)
    return Algorithm(chain(), pairwise(chosen, beta), reference=reference, outer=outer)
