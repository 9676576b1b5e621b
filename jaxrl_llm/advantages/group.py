"""Group-relative credit: each sample is compared with the other samples of its prompt.

Baselines are by key: samples f32[N] that share a key int32[N] form a bucket, a statistic of which is subtracted from
each (`above_baseline`). NaN means not scored: ignored, with result 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.turns.episodes import once_per_episode
from jaxrl_llm.core.choices import Baseline, Scale
from jaxrl_llm.core.objective import require_function
from jaxrl_llm.core.ranges import NonNegative, check_moments, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.shapes import NUMBERS, check_array
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments, bucket_sums
from jaxrl_llm.core.transform import Transform, absent, stateless
from jaxrl_llm.utils.errors import InputError, require_choice

SCALES = ("std", "none", "batch", "sum", "mean")
TOLERANCE = 1e-7  # rewards that differ by less are equal: dividing by a small epsilon would amplify rounding errors


BASELINES = ("mean", "leave_one_out", "weighted", "median", "quantile", "best", "none")


def above_baseline(
    values: jax.Array,
    keys: jax.Array,
    baseline: Baseline = "mean",
    *,
    weights: jax.Array | None = None,
    level: jax.Array | float = 0.5,
) -> jax.Array:
    """r_i - b_i, f32[N], with the baseline b of the bucket:

        mean            the mean, including r_i
        leave_one_out   (sum_j r_j - r_i) / (n - 1): independent of the sample, hence unbiased (2402.14740)
        weighted        sum w_j r_j / sum w_j, including the sample itself, `weights` f32[N] >= 0; with w the squared
                        norm of the score function, the minimum-variance constant (2505.23585)
        median          the 0.5-quantile
        quantile        the quantile of `level`
        best            the maximum
        none            0

    The difference is exactly 0 if all values of a bucket are equal or it has a single one, except for "none".

    >>> print(above_baseline(jnp.array([0.2, 0.5, 0.9]), jnp.zeros(3, jnp.int32), "leave_one_out").round(3))
    [-0.5  -0.05  0.55]
    """
    require_choice("baseline", baseline, BASELINES)
    known = ~jnp.isnan(values)
    if baseline == "none":
        return jnp.where(known, values, 0.0)
    if baseline in ("median", "quantile"):
        return jnp.where(known, values - bucket_quantile(keys, values, 0.5 if baseline == "median" else level), 0.0)
    if baseline == "best":
        return jnp.where(known, values - bucket_best(keys, values), 0.0)
    count, mean, _ = bucket_moments(keys, values)
    centred = jnp.where(known, values - mean, 0.0)
    if baseline == "leave_one_out":
        return centred * count / jnp.maximum(count - 1, 1)
    if baseline == "weighted":
        w = jnp.where(known, jnp.ones_like(centred) if weights is None else weights, 0.0)
        mass, pull = bucket_sums(keys, w, w * centred)
        return jnp.where(known, centred - pull / jnp.where(mass > 0, mass, 1.0), 0.0)
    return centred


def bucket_best(keys: jax.Array, values: jax.Array) -> jax.Array:
    """The maximum of each sample's bucket, f32[N]; 0 if no sample is scored."""
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    top = jax.ops.segment_max(jnp.where(jnp.isnan(values), -jnp.inf, values), index, num_segments=keys.shape[0])[index]
    return jnp.where(jnp.isfinite(top), top, 0.0)


def bucket_quantile(keys: jax.Array, values: jax.Array, level: jax.Array | float) -> jax.Array:
    """The linearly interpolated quantile of each sample's bucket, f32[N]; 0 if no sample is scored."""
    return masked_quantile(values[None], (keys[:, None] == keys[None]) & ~jnp.isnan(values)[None], level)


def masked_quantile(values: jax.Array, mask: jax.Array, level: jax.Array | float) -> jax.Array:
    """The linearly interpolated quantile along the last axis of the values where the mask is true; 0 if it never is.

    >>> print(masked_quantile(jnp.array([3.0, 1.0, 9.0]), jnp.array([True, True, False]), 0.25))
    1.5
    """
    check_number("level", level, least=0, most=1)
    count = jnp.sum(mask, axis=-1, keepdims=True)
    in_order = jnp.sort(jnp.where(mask, values, jnp.inf), axis=-1)
    position = level * jnp.maximum(count - 1, 0).astype(jnp.float32)
    below = jnp.floor(position).astype(jnp.int32)
    low, high = (
        jnp.take_along_axis(in_order, jnp.minimum(i, jnp.maximum(count - 1, 0)), axis=-1) for i in (below, below + 1)
    )
    some = count > 0
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    return (low + (position - below) * (high - low))[..., 0]


def group_advantage(
    reward: jax.Array,
    group: jax.Array,
    *,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
    baseline: Baseline = "mean",
    weights: jax.Array | None = None,
    tolerance: float = TOLERANCE,
) -> jax.Array:
    """A_i = (r_i - mean_g) / (std_g + epsilon), f32[N], over the samples of the same group (DeepSeekMath, 2402.03300).

    reward f32[N], NaN where not scored (advantage 0, not in mean and std); group int32[N]; groups may differ in size.
    baseline and its weights: see `above_baseline`. scale, the divisor: "std" of the group, "batch", the std
    of all rewards, "sum" of both, "mean" of the group (advantage 0 where that is not positive), or "none". ddof: the
    paper does not specify it; implementations use 1. A group of one, or with a standard deviation within `tolerance` of
    0, has advantage 0. Raises InputError for a scale that is not one of SCALES.

    >>> print(group_advantage(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.zeros(4, jnp.int32)).round(4))
    [ 0.866 -0.866 -0.866  0.866]
    """
    _check_scale(scale)
    difference = above_baseline(reward, group, baseline, weights=weights)
    if scale == "none":
        return difference
    _, mean, deviation = bucket_moments(group, reward, ddof)
    if scale == "mean":
        return jnp.where(mean > tolerance, difference / (jnp.maximum(mean, 0.0) + epsilon), 0.0)
    _, level, overall = bucket_moments(jnp.zeros_like(group), reward, ddof)
    divisor = {"std": deviation, "batch": overall, "sum": deviation + overall}[scale]
    size = mean if scale == "std" else level
    varies = divisor > tolerance * jnp.maximum(jnp.abs(size), 1.0)
    return jnp.where(varies, difference / (divisor + epsilon), 0.0)


@part
def group_relative(
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
    baseline: Baseline = "mean",
    weights: Callable[[Trajectories], jax.Array] | None = None,
    over: Literal["episodes", "rows"] = "episodes",
    needs: Iterable[str] = (),
) -> Transform:
    """Write `group_advantage` of the combined reward on every action token of the sample.

    weights: a function of the batch that returns f32[N], for the baseline "weighted". over: what counts once in the
    group, an episode or each of its rows. needs: besides the reward. Raises InputError for a scale that is not one of
    SCALES, for a baseline that is not one of BASELINES, and for another over.
    """
    _check_scale(scale)
    check_moments(ddof, epsilon)
    require_choice("baseline", baseline, BASELINES)
    if weights is not None:
        require_function("weights", weights)

    def advantage(batch: Trajectories) -> jax.Array:
        w = None if weights is None else weights(batch)
        return group_advantage(
            batch.scores, batch.group, scale=scale, ddof=ddof, epsilon=epsilon, baseline=baseline, weights=w
        )

    return on_actions(advantage, needs, over)


def standardised(values: jax.Array, ddof: int = 1, epsilon: float = 1e-8) -> jax.Array:
    """(x - mean) / (std + epsilon) over all samples, f32[N]; NaN is ignored and gets 0, and equal values get 0."""
    return group_advantage(values, jnp.zeros(values.shape, jnp.int32), ddof=ddof, epsilon=epsilon)


def _check_scale(scale: str) -> None:
    if scale not in SCALES:
        wanted = f"but must be one of {', '.join(SCALES)}"
        raise InputError(f"the scale of group-relative advantages is {scale!r}, {wanted}", known=SCALES)


@part
def on_actions(
    advantage: Callable[[Trajectories], jax.Array],
    needs: Iterable[str] = (),
    over: Literal["episodes", "rows"] = "episodes",
) -> Transform:
    """The transform that writes an advantage f32[N], computed from `needs`, on every action token of its sample.

    over: whether an episode of several rows counts once, see `once_per_episode`, or with each row.
    """
    require_function("the advantage", advantage, alone=True)
    require_choice("over", over, ("episodes", "rows"))
    found = once_per_episode(advantage) if over == "episodes" else advantage

    def write(batch: Trajectories) -> Trajectories:
        value = found(batch)
        if value is None and (said := absent(found, batch)):
            raise InputError(said)
        check_array("the advantage", value, NUMBERS, batch.group.shape)
        return batch.replace(advantages=value[:, None] * batch.action_mask)

    return stateless(write, needs)


def uniform_groups(batch: Trajectories) -> jax.Array:
    """bool[N]: samples of groups without learning signal, whose rewards are all equal (or which have a single one)."""
    _, mean, deviation = bucket_moments(batch.group, batch.scores)
    return deviation <= TOLERANCE * jnp.maximum(jnp.abs(mean), 1.0)


def mixed_groups(batch: Trajectories) -> jax.Array:
    """bool[N]: samples of groups with a learning signal, whose rewards are not all equal."""
    return ~uniform_groups(batch)


def truncated_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: samples that ran out of their budget before the end of the answer."""
    return batch.truncated


@part
def drop_rows(dropped: Callable[[Trajectories], jax.Array]) -> Transform:
    """Set the weights of the rows where `dropped(batch)` bool[N] to 0, so that no average counts their tokens.

    If all rows are dropped, all weights and the loss are 0.
    """
    require_function("the rows to drop", dropped)

    def drop(batch: Trajectories) -> Trajectories:
        kept = jnp.where(dropped(batch), 0.0, 1.0)[:, None]
        before = jnp.ones(batch.tokens.shape, jnp.float32) if batch.weights is None else batch.weights
        return batch.replace(weights=before * kept)

    return stateless(drop)


@part
def drop_uniform_groups() -> Transform:
    """Drop the rows of uniform groups (DAPO, 2503.14476)."""
    return drop_rows(uniform_groups)


@part
def drop_small_advantages(least: NonNegative) -> Transform:
    """Drop the rows whose advantages are all smaller than `least` in absolute value (2502.01600)."""
    return drop_rows(lambda b: jnp.max(jnp.abs(b.need("advantages")) * b.action_mask, axis=1) < least)
