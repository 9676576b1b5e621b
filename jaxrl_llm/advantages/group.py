"""Group-relative credit: each sample is compared with the other samples of its prompt.

Baselines are by key: samples f32[N] that share a key int32[N] form a bucket, a statistic of which is subtracted from
each (`above_baseline`). NaN means not scored: ignored, with result 0.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.episodes import once_per_episode
from jaxrl_llm.core.annotations import Baseline, NonNegative, Number, Scale, ZeroOrOne
from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.buckets import bucket_best, bucket_moments, bucket_quantile, bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, Transform, part, stateless
from jaxrl_llm.core.shapes import NUMBERS, check_array
from jaxrl_llm.core.transform import absent
from jaxrl_llm.utils.errors import InputError, require_choice

SCALES = ("std", "none", "batch", "sum", "mean")
TOLERANCE = 1e-7  # rewards that differ by less are equal: dividing by a small epsilon would amplify rounding errors


BASELINES = ("mean", "leave_one_out", "weighted", "median", "quantile", "best", "none")


def above_baseline(
    values: Array, keys: Array, baseline: Baseline = "mean", *, weights: Array | None = None, level: Number = 0.5
) -> Array:
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


def group_advantage(
    reward: Array,
    group: Array,
    *,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
    baseline: Baseline = "mean",
    weights: Array | None = None,
    tolerance: float = TOLERANCE,
) -> Array:
    """A_i = (r_i - mean_g) / (std_g + epsilon), f32[N], over the samples of the same group (DeepSeekMath, 2402.03300).

    reward f32[N], NaN where not scored (advantage 0, not in mean and std); group int32[N]; groups may differ in size.
    baseline and its weights: see `above_baseline`. scale, the divisor: "std" of the group, "batch", the std
    of all rewards, "sum" of both, "mean" of the group (advantage 0 where that is not positive), or "none". ddof: the
    paper does not specify it; implementations use 1. A group of one, or with a standard deviation within `tolerance` of
    0, has advantage 0. Raises InputError for a scale that is not one of SCALES.

    >>> print(group_advantage(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.zeros(4, jnp.int32)).round(4))
    [ 0.866 -0.866 -0.866  0.866]
    """
    if scale not in SCALES:
        wanted = f"but must be one of {', '.join(SCALES)}"
        raise InputError(f"the scale of group-relative advantages is {scale!r}, {wanted}", known=SCALES)
    difference = above_baseline(reward, group, baseline, weights=weights)
    if scale == "none":
        return difference
    _, mean, deviation = bucket_moments(group, reward, ddof)
    if scale == "mean":
        return jnp.where(mean > tolerance, difference / (jnp.maximum(mean, 0.0) + epsilon), 0.0)
    _, level, overall = bucket_moments(jnp.zeros_like(group), reward, ddof)
    divisor = {"std": deviation, "batch": overall, "sum": deviation + overall}[scale]
    varies = divisor > tolerance * jnp.maximum(jnp.abs(mean if scale == "std" else level), 1.0)
    return jnp.where(varies, difference / (divisor + epsilon), 0.0)


@part
def group_relative(
    scale: Scale = "std",
    ddof: ZeroOrOne = 1,
    epsilon: NonNegative = 1e-6,
    baseline: Baseline = "mean",
    weights: Callable[[Trajectories], Array] | None = None,
    over: Literal["episodes", "rows"] = "episodes",
    needs: Iterable[str] = (),
) -> Transform:
    """Write `group_advantage` of the combined reward on every action token of the sample.

    weights: a function of the batch that returns f32[N], for the baseline "weighted". over: what counts once in the
    group, an episode or each of its rows. needs: besides the reward. Raises InputError for a scale that is not one of
    SCALES, for a baseline that is not one of BASELINES, and for another over.
    """
    if weights is not None:
        require_function("weights", weights)

    def advantage(batch: Trajectories) -> Array:
        w = None if weights is None else weights(batch)
        return group_advantage(
            batch.scores, batch.group, scale=scale, ddof=ddof, epsilon=epsilon, baseline=baseline, weights=w
        )

    return on_actions(advantage, needs, over)


def standardised(values: Array, ddof: int = 1, epsilon: float = 1e-8) -> Array:
    """(x - mean) / (std + epsilon) over all samples, f32[N]; NaN is ignored and gets 0, and equal values get 0."""
    return group_advantage(values, jnp.zeros(values.shape, jnp.int32), ddof=ddof, epsilon=epsilon)


@part
def on_actions(
    advantage: Callable[[Trajectories], Array],
    needs: Iterable[str] = (),
    over: Literal["episodes", "rows"] = "episodes",
) -> Transform:
    """The transform that writes an advantage f32[N], computed from `needs`, on every action token of its sample.

    over: whether an episode of several rows counts once, see `once_per_episode`, or with each row.
    """
    require_function("the advantage", advantage, alone=True)
    found = once_per_episode(advantage) if over == "episodes" else advantage

    def write(batch: Trajectories) -> Trajectories:
        value = found(batch)
        if value is None and (said := absent(found, batch)):
            raise InputError(said)
        check_array("the advantage", value, NUMBERS, batch.group.shape)
        return batch.replace(advantages=value[:, None] * batch.action_mask)

    return stateless(write, needs)
