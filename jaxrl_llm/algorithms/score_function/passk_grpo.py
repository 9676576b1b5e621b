from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import on_actions
from jaxrl_llm.advantages.sets import best_of_sets_advantage
from jaxrl_llm.algorithms.classic.reinforce import averaged_gradient
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Code, Count, NonNegative, Paper
from jaxrl_llm.core.buckets import bucket_best, bucket_moments, bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, batch_part
from jaxrl_llm.objectives import clip
from jaxrl_llm.selection.rows import ranks_within


@batch_part
def best_of_sets_credit(
    batch: Trajectories, k: int, estimator: str, scale: Literal["std", "none"], epsilon: float
) -> Array:
    """A function `batch -> f32[N]`: the advantages of `passk_grpo`."""
    r, group = batch.scores, batch.group
    if estimator == "margin":
        divisor = bucket_moments(group, r)[2] + epsilon if scale == "std" else 1.0
        return margin_over_second(r, group) / divisor
    return best_of_sets_advantage(r, group, k, "unbiased" if estimator == "unbiased" else scale, epsilon)


@method(paper="arXiv 2508.10751", test="test_sets.py::test_passk_is_the_loop_over_all_sets")
def passk_grpo(
    k: Paper[Count] = 4,
    estimator: Paper[Literal["subsets", "unbiased", "margin"]] = "subsets",
    scale: Paper[Literal["std", "none"]] = "std",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    epsilon: Code[NonNegative] = 1e-6,
    average: Code[AverageName] = "token",
) -> Algorithm:
    """Pass@k training (Pass@k Training for Balancing Exploration and Exploitation).

    The reward of a set is that of its best member, which preserves exploration. For the C(n, k) sets of k responses of
    a group of n, f(S) = max_S r; E_i is the mean of f over the sets that contain i, E over all sets, sigma the standard
    deviation over all sets. estimator:

        "subsets"   A_i = (E_i - E) / (sigma + epsilon): the paper's for rewards 0 and 1, extended to any rewards;
                    k = 1 is GRPO with the population standard deviation
        "unbiased"  A_i = k (E_i - E[max of k others]), the gradient of pass@k (PKPO, arXiv 2505.15201): its k/n E_i,
                    times n because the loss is averaged over responses, with a leave-one-out baseline; k = 1 is RLOO
        "margin"    the best response's reward minus the second best, / (std + epsilon) of the group's rewards, for
                    the best one; 0 for the others (arXiv 2503.19595; k is not used)

    scale "none" leaves out the divisions. Groups of at most k responses use sets of n - 1, where the paper has
    advantage 0. The loss is PPO's clip (clip_low, clip_high) without KL; average as in `grpo` ("token" is verl's, for
    which both released estimators are written).
    """
    credit = on_actions(best_of_sets_credit(k, estimator, scale, epsilon))
    return Algorithm(credit, averaged_gradient(clip(clip_low, clip_high), average))


def margin_over_second(values: Array, keys: Array) -> Array:
    """Maximum minus second largest value for the best sample of each bucket, 0 for the others, f32[N] (2503.19595).

    This is how much the maximum of the bucket would drop without the sample. 0 for ties and in a bucket of one.
    """
    known = ~jnp.isnan(values)
    rank = ranks_within(keys, values, jnp.zeros(values.shape), known)
    second = bucket_best(keys, jnp.where(rank > 0, values, jnp.nan))
    (count,) = bucket_sums(keys, known.astype(jnp.float32))
    return jnp.where(known & (rank == 0) & (count > 1), values - second, 0.0)
