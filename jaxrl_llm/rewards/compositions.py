"""Combinations of reward components beyond a weighted sum, as functions of a batch for `transforms.rescore`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_sums
from jaxrl_llm.utils.errors import unknown

Number = float | jax.Array


def cosine_length(
    correct: jax.Array, share: jax.Array, best: Number = 1.0, right: Number = 0.5, worst: Number = -0.5
) -> jax.Array:
    """A reward that falls along a cosine with the length, f32[N]: from `best` to `right`, if wrong from 0 to `worst`.

    correct: bool[N]. share: f32[N], length / longest length, of which more than 1 counts as 1.

    >>> share = jnp.array([0.0, 0.5, 1.0])
    >>> cosine_length(share >= 0, share).tolist(), cosine_length(share < 0, share).tolist()
    ([1.0, 0.75, 0.5], [0.0, -0.25, -0.5])
    """
    fall = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(share, 0.0, 1.0)))
    return jnp.where(correct, right + fall * (best - right), worst + fall * (0.0 - worst))


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
    N = group.shape[0]
    _, index = jnp.unique(group, return_inverse=True, size=N)
    low = jax.ops.segment_min(jnp.where(known, distance, jnp.inf), index, num_segments=N)[index]
    high = jax.ops.segment_max(jnp.where(known, distance, -jnp.inf), index, num_segments=N)[index]
    wide = known & (high - low >= 1e-6)
    d = jnp.where(wide, (distance - low) / jnp.where(wide, high - low, 1.0), 0.5)
    (successes,) = bucket_sums(group, success.astype(jnp.float32))
    grade = jnp.where(known & (successes > 0), most * jax.nn.sigmoid(slope * (0.5 - d)), 0.0)
    return jnp.where(success, 1.0, grade)


def length_beside_mates(
    length: jax.Array, right: jax.Array, known: jax.Array, group: jax.Array, slope: Number = -0.5, offset: Number = 0.5
) -> jax.Array:
    """What a completion's length adds to its reward, f32[N], measured by a length that suits its prompt.

    With p the share of right rows bool[N] among the known ones of a prompt, the suitable length is p (mean length of
    the right ones) + (1 - p) (longest), and x the relative excess over it: max(slope x + offset, 0.1) for right rows,
    min(0.9 x - 0.1, -0.1) for wrong ones. 0 for rows that are not known.

    >>> right, length = jnp.array([True, True, False, False]), jnp.array([100.0, 200, 150, 400])
    >>> found = length_beside_mates(length, right, length > 0, jnp.zeros(4, jnp.int32))
    >>> print([f"{x:.3f}" for x in found])
    ['0.818', '0.636', '-0.509', '-0.100']
    """
    right = right & known
    N = group.shape[0]
    _, index = jnp.unique(group, return_inverse=True, size=N)
    longest = jax.ops.segment_max(jnp.where(known, length, 0.0), index, num_segments=N)[index]
    count, good, tokens = bucket_sums(group, known * 1.0, right * 1.0, jnp.where(right, length, 0.0))
    p = good / jnp.maximum(count, 1)
    suitable = p * tokens / jnp.maximum(good, 1) + (1 - p) * longest
    x = (length - suitable) / jnp.maximum(suitable, 1e-6)
    added = jnp.where(right, jnp.maximum(slope * x + offset, 0.1), jnp.minimum(0.9 * x - 0.1, -0.1))
    return jnp.where(known, added, 0.0)


def component_of(batch: Trajectories, name: str) -> jax.Array:
    if name not in (batch.rewards or {}):
        raise unknown("reward component", name, batch.rewards or {})
    return (batch.rewards or {})[name].astype(jnp.float32)


def other_components(batch: Trajectories, *names: str) -> list[jax.Array]:
    return [x.astype(jnp.float32) for name, x in sorted((batch.rewards or {}).items()) if name not in names]


@part
def length_graded(
    accuracy: str | None, success: float, weight: float, other_weight: float, longest: float, right: float, worst: float
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: weight `cosine_length` + other_weight (sum of the other components).

    Right is a component `accuracy`, or the combined reward where it is None, above `success`.
    """

    def reward(batch: Trajectories) -> jax.Array:
        score = batch.scores if accuracy is None else component_of(batch, accuracy)
        graded = cosine_length(score > success, batch.lengths / longest, 1.0, right, worst)
        rest = [] if accuracy is None else other_components(batch, accuracy)
        return weight * graded + other_weight * sum((jnp.nan_to_num(x) for x in rest), jnp.zeros(score.shape))

    return reward


@part
def product_of_factors(
    progress: str | None, terminal: str | None, penalty: float
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the component `progress` times all others, clipped to [0, 1], or -penalty.

    progress: None is the product of all components, clipped to [0, 1], and the reward itself where there is but one.
    -penalty is the reward where the component `terminal` is above 0.5; None: nowhere. A component that did not score a
    row is the factor 1.
    """

    def reward(batch: Trajectories) -> jax.Array:
        factors = other_components(batch, terminal or "") if progress is None else other_components(batch, progress, terminal or "")
        if progress is not None:
            out = component_of(batch, progress)
        elif len(factors) < 2:
            out, factors = (factors[0] if factors else batch.scores), []
        else:
            out = jnp.ones(batch.group.shape)
        for factor in factors:
            out = out * jnp.where(jnp.isnan(factor), 1.0, jnp.clip(factor, 0.0, 1.0))
        return out if terminal is None else jnp.where(component_of(batch, terminal) > 0.5, -penalty, out)

    return reward


@part
def failures_by_distance(success: float, most: float, slope: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: `graded_failures` by info["distance"]; failures get 0 where there is none.

    Distances of rows without a score do not count.
    """

    def reward(batch: Trajectories) -> jax.Array:
        nothing = jnp.full(batch.group.shape, jnp.nan)
        distance = (batch.info or {}).get("distance", nothing).astype(jnp.float32)
        distance = jnp.where(jnp.isnan(batch.scores), jnp.nan, distance)
        return graded_failures(batch.scores > success, distance, batch.group, most, slope)

    return reward


@part
def success_rate(least: float, most: float, success: float, within: bool = True) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> bool[N]`: rows of groups whose share of scores above `success` is in [least, most], or not.

    within: False marks the rows of the other groups.
    """

    def marked(batch: Trajectories) -> jax.Array:
        known = ~jnp.isnan(batch.scores)
        good, count = bucket_sums(batch.group, (batch.scores > success) * 1.0, known * 1.0)
        rate = good / jnp.maximum(count, 1)
        return ((rate >= least - 1e-6) & (rate <= most + 1e-6)) == within

    return marked


@part
def with_length_beside_mates(right: float, slope: float, offset: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the scores plus `length_beside_mates`; rows are right from the score `right` on."""

    def reward(batch: Trajectories) -> jax.Array:
        known, score = ~jnp.isnan(batch.scores), batch.scores
        return score + length_beside_mates(batch.lengths, score >= right, known, batch.group, slope, offset)

    return reward


@part
def weighted_components(weights: Mapping[str, float]) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the weighted sum of these components, whatever weights the run gives them.

    The combined reward where the batch lacks one of them, as in a run that goes without it.
    """

    def reward(batch: Trajectories) -> jax.Array:
        if not set(weights) <= set(batch.rewards or {}):
            return batch.scores
        return sum((w * component_of(batch, name) for name, w in weights.items()), jnp.zeros(batch.group.shape))

    return reward


@part
def reward_component(name: str | None) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: one component of the reward, or the combined one for None."""
    return lambda batch: batch.scores if name is None else component_of(batch, name)
