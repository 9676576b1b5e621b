from jaxrl_llm.advantages import energy_weighted_baseline
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative
from jaxrl_llm.objectives import log_probability, policy_gradient, sequence_sum, token_ratio


@method(paper="arXiv 2602.07078", test="test_score_function.py::test_optimal_token_baseline_is_the_loop")
def optimal_token_baseline(
    zero_tail: Code[bool] = True, corrected: Code[bool] = False, epsilon: Code[NonNegative] = 1e-8
) -> Algorithm:
    """Optimal Token Baseline (OTB, Variance Reduction for Long-Horizon LLM-RL).

    One baseline per group and token index t, weighted by the squared gradient norm accumulated up to t:

        w_it = 1 - 2 pi(a_t) + sum_v pi(v)^2,    W_it = sum_{s <= t} w_is
        B_t = sum_i G_it W_it / (sum_i W_it + epsilon),    A_it = G_it - B_t,    loss = -1/N sum_i sum_t A log pi(a_t)

    over the group's responses with at least t actions, G the reward-to-go, pi the policy before the update. w is the
    squared norm of the gradient with respect to the logits. The index t counts actions over all turns. zero_tail: B = 0
    where a single response is left, whose baseline would be its own return (verl since 2026, and its multi-turn
    version). corrected: multiplies w by (pi_old / pi_behaviour)^2. A group of one has B = 0.
    """
    objective = policy_gradient(token_ratio(), log_probability(), sequence_sum())
    return Algorithm(energy_weighted_baseline(zero_tail, corrected, epsilon), objective)
