import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.algorithm import DynamicSampling
from jaxrl_llm.core.annotations import AverageName, Code, Count, NonNegative, Number, Ours
from jaxrl_llm.core.buckets import bucket_best, bucket_sums
from jaxrl_llm.core.parts import Trajectories, batch_part, chain
from jaxrl_llm.objectives import average_by_name, clipped_policy
from jaxrl_llm.rewards.transforms import leave_out, rescore
from jaxrl_llm.utils.errors import InputError


@method(paper="arXiv 2511.15605", test="test_reward_composed.py::test_srpo_is_the_loop")
@run_needs(distance="distances of failures to successes; without them failures get 0")
def srpo_self_referential(
    success: Ours[float] = 0.5,
    most: Code[float] = 0.6,
    slope: Code[float] = 10.0,
    least_rate: Code[float] = 0.1,
    most_rate: Code[float] = 0.9,
    rounds: Ours[Count] = 10,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.28,
    average: Ours[AverageName] = "token",
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
    if not 0 <= least_rate <= most_rate <= 1:
        raise InputError(f"the rates are {least_rate} and {most_rate}, but must be 0 <= least_rate <= most_rate <= 1")
    informative = success_rate(least_rate, most_rate, success)
    outside = success_rate(least_rate, most_rate, success, within=False)
    grade = rescore(failures_by_distance(success, most, slope), {"distance"})
    objective = clipped_policy(clip_low, clip_high, average_by_name(average))
    credit = chain(leave_out(outside), grade, group_relative())
    return Algorithm(credit, objective, curriculum=DynamicSampling(informative, rounds))


def graded_failures(
    success: jax.Array, distance: jax.Array, group: jax.Array, most: Number = 0.6, slope: Number = 10.0
) -> jax.Array:
    """1 for successes, and for failures most sigmoid(slope (1/2 - d)), f32[N].

    distance f32[N]: of a failure to the successes of its group; NaN: none, reward 0. d is the distance rescaled to
    [0, 1] over the failures of the group that have one; 1/2 where all are the same.

    >>> d = jnp.array([2.0, 3.0, 5.0, jnp.nan])
    >>> found = graded_failures(jnp.array([False, False, False, True]), d, jnp.zeros(4, jnp.int32))
    >>> print([f"{x:.4f}" for x in found])
    ['0.5960', '0.5047', '0.0040', '1.0000']
    """
    known = ~success & ~jnp.isnan(distance)
    low, high = (sign * bucket_best(group, jnp.where(known, sign * distance, jnp.nan)) for sign in (-1, 1))
    wide = known & (high - low >= 1e-6)
    d = jnp.where(wide, (distance - low) / jnp.where(wide, high - low, 1.0), 0.5)
    (successes,) = bucket_sums(group, success.astype(jnp.float32))
    grade = jnp.where(known & (successes > 0), most * jax.nn.sigmoid(slope * (0.5 - d)), 0.0)
    return jnp.where(success, 1.0, grade)


@batch_part
def failures_by_distance(batch: Trajectories, success: float, most: float, slope: float) -> jax.Array:
    """A function `batch -> f32[N]`: `graded_failures` by info["distance"]; failures get 0 where there is none.

    Distances of rows without a score do not count.
    """
    distance = jnp.where(jnp.isnan(batch.scores), jnp.nan, batch.entry("distance", jnp.nan).astype(jnp.float32))
    return graded_failures(batch.scores > success, distance, batch.group, most, slope)


@batch_part
def success_rate(batch: Trajectories, least: float, most: float, success: float, within: bool = True) -> jax.Array:
    """A function `batch -> bool[N]`: rows of groups whose share of scores above `success` is in [least, most], or not.

    within: False marks the rows of the other groups.
    """
    known = ~jnp.isnan(batch.scores)
    good, count = bucket_sums(batch.group, (batch.scores > success) * 1.0, known * 1.0)
    rate = good / jnp.maximum(count, 1)
    return ((rate >= least - 1e-6) & (rate <= most + 1e-6)) == within
