from typing import Literal

from jaxrl_llm.advantages import decoupled
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import AverageName, Code, NonNegative, Paper, ZeroOrOne


@method(paper="arXiv 2601.05242", test="test_multi_reward.py::test_gdpo_against_a_loop")
@presets(
    paper={"normalise": "sequences", "average": "sequence"},
    code={"normalise": "tokens", "epsilon": 1e-6, "batch_epsilon": 1e-8, "average": "token"},
)
def gdpo(
    weights: Paper[str] = "",
    normalise: Paper[Literal["none", "sequences", "tokens"]] = "sequences",
    epsilon: Code[NonNegative] = 1e-4,
    batch_epsilon: Code[NonNegative] = 1e-4,
    ddof: Code[ZeroOrOne] = 1,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.0,
    average: Paper[AverageName] = "sequence",
) -> Algorithm:
    """Group reward-Decoupled Normalization Policy Optimization (GDPO).

    Each reward is normalised in its group before they are summed, so that different combinations of rewards keep
    different advantages; then the sum is normalised over the batch, so that its scale does not grow with their number:

        s_i = sum_k w_k (r_ik - mean_g r_k) / (std_g r_k + epsilon),  A_i = (s_i - mean s) / (std s + batch_epsilon)

    with ddof in both deviations. `weights` is a text such as "correct=1,format=0.5" with the names of reward
    components; components that it does not name have weight 1, and a batch without components has a single one, its
    reward. The loss is GRPO's with clip_low, clip_high, kl_coefficient (paper and code: 0) and average (see
    `objectives.averages.average_by_name`; the paper's formula has "sequence", the verl code "token").

    normalise: "sequences" counts each sequence once (paper, TRL code) and leaves a single component as it is (TRL code;
    the paper always has several); "tokens" is the verl code, in which each sequence counts by its length, the divisor
    is sqrt(var + batch_epsilon), a single component is normalised too, and the epsilons are 1e-6 and 1e-8 (preset
    "code"); "none" skips the step. Both codes count a component that did not score a row as 0; here it is ignored, also
    in its group's mean and deviation.
    """
    loss = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    return Algorithm(decoupled(weights, normalise, ddof, epsilon, batch_epsilon), loss.objective)
