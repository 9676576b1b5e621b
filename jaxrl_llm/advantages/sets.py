"""Set-level credit: k samples of a prompt get a joint reward f(S), e.g. their maximum, shared by the members.

A group of n samples has C(n, k) sets of k. The value of a member is the mean reward of the sets that contain it,
E_i = E[f(S) | i in S], whose mean over the group is E[f(S)]. Everything is in closed form, without sampling sets.
Groups of at most k samples use sets of n - 1, because all members of the full set would have the same value.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.core.annotations import Number, check_number
from jaxrl_llm.core.buckets import bucket_best, bucket_sums
from jaxrl_llm.core.parts import Array
from jaxrl_llm.selection.rows import ranks_within
from jaxrl_llm.utils.errors import require_choice

SET_SCALES = ("std", "none", "unbiased")
Diversity = Literal["share", "share_or_zero", "zero_based"]


def sets_within(part: Array, whole: Number, size: Array, largest: int) -> Array:
    """C(part, size) / C(whole, size): the share of sets that lie within a subset, elementwise; 1 for size 0.

    Computed as a product of `size` factors (part - u) / (whole - u), which does not overflow for large binomials.
    largest: an upper bound of size.
    """

    def factor(u: Array, product: Array) -> Array:
        u = jnp.asarray(u, jnp.float32)
        return product * jnp.where(u < size, jnp.maximum(part - u, 0.0) / jnp.maximum(whole - u, 1.0), 1.0)

    shape = jnp.broadcast_shapes(jnp.shape(part), jnp.shape(whole), jnp.shape(size))
    return jax.lax.fori_loop(0, largest, factor, jnp.ones(shape, jnp.float32))


def set_sizes(values: Array, keys: Array, k: int) -> tuple[Array, Array]:
    """Number n of scored samples in each sample's group, and its set size max(min(k, n - 1), 1); f32[N] each."""
    (n,) = bucket_sums(keys, (~jnp.isnan(values)).astype(jnp.float32))
    return n, jnp.maximum(jnp.minimum(jnp.asarray(k, jnp.float32), n - 1), 1.0)


def best_of_sets(values: Array, keys: Array, k: int) -> tuple[Array, Array]:
    """f(S) = max_S r: E_i, and the standard deviation of f over all sets of the group, f32[N] each.

    values f32[N], NaN where not scored (result 0); keys int32[N]. With r sorted, r_(1) the smallest, r_(m) with
    m > rank of i is the maximum in C(m-2, k-2) of the C(n-1, k-1) sets with i, and i itself in C(rank-1, k-1).
    """
    known = ~jnp.isnan(values)
    n, size = set_sizes(values, keys, k)
    top = bucket_best(keys, values)
    r = jnp.where(known, values - top, 0.0)  # at most 0, so that equal values are 0 exactly
    below = ranks_within(keys, -r, jnp.zeros(r.shape), known).astype(jnp.float32)
    among_others = sets_within(below, n - 1, size - 1, k)
    gained = r * (among_others - sets_within(below - 1, n - 1, size - 1, k))
    better = (keys[:, None] == keys[None]) & known[None] & (below[None] > below[:, None])
    member = r * among_others + jnp.sum(jnp.where(better, gained[None], 0.0), axis=1)
    probability = jnp.where(known, sets_within(below + 1, n, size, k) - sets_within(below, n, size, k), 0.0)
    mean, square = bucket_sums(keys, probability * r, probability * r**2)
    return jnp.where(known, top + member, 0.0), jnp.sqrt(jnp.maximum(square - mean**2, 0.0))


def best_of_sets_advantage(
    values: Array, keys: Array, k: int = 4, scale: Literal["std", "none", "unbiased"] = "std", epsilon: float = 1e-6
) -> Array:
    """Advantage f32[N] for E[max of k]; with rewards 0 and 1, pass@k. E is the mean of E_i over the group.

    scale "std": (E_i - E) / (std + epsilon), std of f over the sets; k = 1 is GRPO with the population standard
    deviation (2508.10751). "none": E_i - E. "unbiased": k (E_i - E[max of k of the others]) = k n / (n - k) (E_i - E),
    whose average over the group times grad log pi is the gradient of E[max of k]; k = 1 is leave-one-out (2505.15201).
    """
    require_choice("scale", scale, SET_SCALES)
    check_number("k", k, least=1, whole=True)
    member, deviation = best_of_sets(values, keys, k)
    difference = above_baseline(jnp.where(jnp.isnan(values), jnp.nan, member), keys)
    if scale == "std":
        return jnp.where(deviation > 1e-6, difference / (deviation + epsilon), 0.0)
    if scale == "unbiased":
        n, size = set_sizes(values, keys, k)
        return size * n / jnp.maximum(n - size, 1.0) * difference
    return difference


def diverse_sets(values: Array, answers: Array, keys: Array, k: int, diversity: Diversity = "share") -> Array:
    """f(S) = mean_S r * d(S): E_i, f32[N] (2509.25424); 0 where not scored.

    d depends on D, the number of distinct `answers` int32[N] in the set: "share" D / k; "share_or_zero" the same, but 0
    where D = 1; "zero_based" (D - 1) / (k - 1).
    An answer that m of the n samples gave is in a random set with probability 1 - C(n-m, k) / C(n, k). Conditioned on
    the set containing i, or i and another sample, the same holds for its other k - 1, or k - 2, members.
    """
    require_choice("diversity", diversity, get_args(Diversity))
    known = ~jnp.isnan(values)
    n, size = set_sizes(values, keys, k)
    same_group = (keys[:, None] == keys[None]) & known[None] & known[:, None]
    same_answer = same_group & (answers[:, None] == answers[None])

    def summed(over: Array, x: Array) -> Array:
        return jnp.sum(jnp.where(over, x[None], 0.0), axis=1)

    R = jnp.where(known, values, 0.0)
    m = jnp.maximum(summed(same_answer, jnp.ones_like(R)), 1.0)
    hit_1 = 1 - sets_within(n - 1 - m, n - 1, size - 1, k)
    hit_2 = 1 - sets_within(n - 2 - m, n - 2, size - 2, k)
    answers_1, answers_2 = (summed(same_group, hit / m) for hit in (hit_1, hit_2))  # expected number of answers
    other_answer = same_group & ~same_answer
    alike = summed(same_answer, R) - R
    others = summed(other_answer, R)
    distinct_others = others * (2 + answers_2 - hit_2) - summed(other_answer, R * hit_2)
    companion = (size - 1) / jnp.maximum(n - 1, 1.0)  # probability that a set with i contains a given other sample
    rewards = R + companion * (alike + others)
    products = R * (1 + answers_1 - hit_1) + companion * (alike * (1 + answers_2 - hit_2) + distinct_others)
    if diversity == "share_or_zero":  # subtract the sets with i whose members all agree
        agree = sets_within(m - 1, n - 1, size - 1, k)
        products -= agree * (R + (size - 1) * alike / jnp.maximum(m - 1, 1.0))
    zero = 1.0 if diversity == "zero_based" else 0.0
    return jnp.where(known, (products - zero * rewards) / (size * jnp.maximum(size - zero, 1.0)), 0.0)


def diverse_sets_advantage(
    values: Array, answers: Array, keys: Array, k: int = 4, diversity: Diversity = "share"
) -> Array:
    """E_i - E of `diverse_sets`, f32[N]: 0 in a group of one, and where all sets have the same reward."""
    check_number("k", k, least=1, whole=True)
    member = diverse_sets(values, answers, keys, k, diversity)
    return above_baseline(jnp.where(jnp.isnan(values), jnp.nan, member), keys)
