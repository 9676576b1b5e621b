"""Self-Referential Policy Optimization (SRPO)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, OURS, Count, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import average_by_name
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.rewards.compositions import failures_by_distance, success_rate
from jaxrl_llm.rewards.transforms import leave_out, rescore
from jaxrl_llm.utils.errors import InputError


@method(
    paper="arXiv 2511.15605",
    year=2025,
    test="test_reward_composed.py::test_srpo_is_the_loop",
    needs={"distance": "distances of failures to successes; without them failures get 0"},
)
def srpo_self_referential(
    success: Annotated[float, OURS] = 0.5,
    most: Annotated[float, CODE] = 0.6,
    slope: Annotated[float, CODE] = 10.0,
    least_rate: Annotated[float, CODE] = 0.1,
    most_rate: Annotated[float, CODE] = 0.9,
    rounds: Annotated[Count, OURS] = 10,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.28,
    average: Annotated[AverageName, OURS] = "token",
) -> Algorithm:
    """Self-Referential Policy Optimization (SRPO).

    Failures are graded by how close they come to the successes of the same prompt in the same batch. With d_i the
    distance of failure i to the nearest centre of a cluster of successes, rescaled over the failures of the prompt
    to [0, 1],

        r_i = 1 for a success (score above `success`),   r_i = most sigmoid(slope (1/2 - d_i)) for a failure

    and 0 for failures of prompts without a success. Then GRPO with standard deviations, clip_low and clip_high, and no
    penalties, on prompts whose success rate is within [least_rate, most_rate]: others are sampled again, for at most
    `rounds` rounds, and left out. average: see `average_by_name`.

    The paper trains robots' policies, whose trajectories are videos in the latent space of a world model. Here they are
    texts: `--rewards 'distances(number_match)'` measures info["distance"] on counts of words; with another `success`
    than 0.5 write it there too, 'distances(number_match, 0.8)'. Another encoder is a
    reward function that returns the entry "distance".
    """
    check_number("rounds", rounds, least=1, whole=True)
    if not 0 <= least_rate <= most_rate <= 1:
        raise InputError(f"the rates are {least_rate} and {most_rate}, but must be 0 <= least_rate <= most_rate <= 1")
    informative = success_rate(least_rate, most_rate, success)
    outside = success_rate(least_rate, most_rate, success, within=False)
    grade = rescore(failures_by_distance(success, most, slope), {"distance"})
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average_by_name(average))
    return Algorithm(
        chain(leave_out(outside), grade, group_relative()),
        objective,
        curriculum=DynamicSampling(informative, rounds),
    )
