"""Group-relative credit: each sample is compared with the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.baselines import BASELINES, above_baseline
from jaxrl_llm.coefficients import check_moments, check_number
from jaxrl_llm.errors import InputError, require_choice
from jaxrl_llm.grouping import bucket_moments
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import Transform, require_function, stateless

SCALES = ("std", "none", "batch", "sum", "mean")
TOLERANCE = 1e-7  # rewards that differ by less are equal: dividing by a small epsilon would amplify rounding errors


def group_advantage(
    reward: jax.Array,
    group: jax.Array,
    *,
    scale: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
    baseline: str = "mean",
    weights: jax.Array | None = None,
    tolerance: float = TOLERANCE,
) -> jax.Array:
    """A_i = (r_i - mean_g) / (std_g + epsilon), f32[N], over the samples of the same group (DeepSeekMath, 2402.03300).

    reward f32[N], NaN where not scored (advantage 0, not in mean and std); group int32[N]; groups may differ in size.
    baseline and its weights: see `baselines.above_baseline`. scale, the divisor: "std" of the group, "batch", the std
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


def group_relative(
    scale: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
    baseline: str = "mean",
    weights: Callable[[Trajectories], jax.Array] | None = None,
) -> Transform:
    """Write `group_advantage` of the combined reward on every action token of the sample.

    weights: a function of the batch that returns f32[N], for the baseline "weighted". Raises InputError for a scale
    that is not one of SCALES, and for a baseline that is not one of BASELINES.
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

    return on_actions(advantage)


def standardised(values: jax.Array, ddof: int = 1, epsilon: float = 1e-8) -> jax.Array:
    """(x - mean) / (std + epsilon) over all samples, f32[N]; NaN is ignored and gets 0, and equal values get 0."""
    return group_advantage(values, jnp.zeros(values.shape, jnp.int32), ddof=ddof, epsilon=epsilon)


def _check_scale(scale: str) -> None:
    if scale not in SCALES:
        wanted = f"but must be one of {', '.join(SCALES)}"
        raise InputError(f"the scale of group-relative advantages is {scale!r}, {wanted}", known=SCALES)


def on_actions(advantage: Callable[[Trajectories], jax.Array], needs: Iterable[str] = ()) -> Transform:
    """The transform that writes an advantage f32[N], computed from `needs`, on every action token of its sample."""
    require_function("the advantage", advantage)
    return stateless(lambda b: b.replace(advantages=advantage(b)[:, None] * b.action_mask), needs)


def uniform_groups(batch: Trajectories) -> jax.Array:
    """bool[N]: samples of groups without learning signal, whose rewards are all equal (or which have a single one)."""
    _, mean, deviation = bucket_moments(batch.group, batch.scores)
    return deviation <= TOLERANCE * jnp.maximum(jnp.abs(mean), 1.0)


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


def drop_uniform_groups() -> Transform:
    """Drop the rows of uniform groups (DAPO, 2503.14476)."""
    return drop_rows(uniform_groups)


def drop_small_advantages(least: float) -> Transform:
    """Drop the rows whose advantages are all smaller than `least` in absolute value (2502.01600)."""
    check_number("least", least, least=0)
    return drop_rows(lambda b: jnp.max(jnp.abs(b.need("advantages")) * b.action_mask, axis=1) < least)
