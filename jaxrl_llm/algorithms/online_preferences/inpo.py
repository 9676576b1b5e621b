from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Count, OpenFraction, Ours, Positive
from jaxrl_llm.core.parts import chain
from jaxrl_llm.core.reference import periodic_reset, with_initial
from jaxrl_llm.objectives import pairwise
from jaxrl_llm.objectives.preference.losses import ipo, of_sums
from jaxrl_llm.rollouts.pairs import best_and_worst_of


@method(paper="arXiv 2407.00617", test="test_online_preferences.py::test_inpo_by_loop_and_worked_example")
def inpo(eta: Code[Positive] = 7.5e-3, share: Code[OpenFraction] = 1 / 3, reset: Ours[Count] = 100) -> Algorithm:
    """Iterative Nash Policy Optimization (INPO).

    Mirror descent on the game of preferences between policies, which needs no more than which response of a pair won.
    Anchors are the initial policy and pi_t, the policy at the beginning of a round of `reset` updates, which samples
    the pairs. With D(p) = log p(y_w) - log p(y_l), sums over tokens, and share = tau / eta

        h = D(pi) - share D(pi_0) - (1 - share) D(pi_t),   loss = mean over pairs of (h - 1 / (2 eta))^2

    The pair is the best and the worst of a group by the run's rewards, or by a judge of pairs (--rollout judged_pairs
    --rewards judge), whose mean win rate is the score of a tournament of all with all. share near 0 is IPO against the
    last round, near 1 IPO against the initial policy. Sampling within a round follows the policy, not pi_t: with
    `reset` 1 it is both.
    """
    return Algorithm(
        chain(), pairwise(of_sums(ipo), eta), rollout=best_and_worst_of(),
        reference=with_initial(periodic_reset(reset), share),
    )  # fmt: skip
