from jaxrl_llm.advantages import variance_weighted
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, NonNegative, Ours, Paper, ZeroOrOne


@method(paper="arXiv 2605.25604", test="test_multi_reward.py::test_dvao_against_a_loop")
def dvao(
    weights: Paper[str] = "",
    epsilon: Ours[NonNegative] = 1e-6,
    ddof: Paper[ZeroOrOne] = 0,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
    average: Ours[AverageName] = "sequence",
) -> Algorithm:
    """Dynamic Variance-adaptive Advantage Optimization (DVAO).

    The group-normalised advantages of the rewards are summed with weights proportional to w_k std_g r_k, so that the
    weight of a reward is its standard deviation in the group. In closed form

        A_i = sum_k w_k (r_ik - mean_g r_k) / (sum_l w_l std_g r_l + epsilon)

    which never divides by a small deviation; |A| is at most that of the weighted sum of rewards under GRPO. weights: a
    text such as "correct=1,format=0.5", where components that it does not name have weight 1; only their proportions
    matter, so 1 each is the paper's 1/n. ddof 0 is the population deviation of the paper's propositions; 1 scales all
    advantages of a group by the same factor. The loss is GRPO's (clip_low, clip_high, kl_coefficient, average).
    """
    loss = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    return Algorithm(variance_weighted(weights, ddof, epsilon), loss.objective)
