"""Normalisation by mean and variance: of a masked array, or running over all batches so far (Welford)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import State, Transform


def moments(values: jax.Array, mask: jax.Array, ddof: int = 1) -> tuple[jax.Array, jax.Array]:
    """Mean and variance f32[] of what the mask has; variance 0 where that is no more than `ddof` values.

    Sums are of the distances to the greatest value: equal values, however large, have the variance 0 exactly.
    """
    count = jnp.sum(mask).astype(jnp.float32)
    top = jnp.where(count > 0, jnp.max(jnp.where(mask, values, -jnp.inf), initial=-jnp.inf), 0.0)
    below = jnp.where(mask, values - top, 0.0)
    mean = jnp.sum(below) / jnp.maximum(count, 1)
    squares = jnp.sum(jnp.where(mask, (below - mean) ** 2, 0.0))
    return top + mean, squares / jnp.maximum(count - ddof, 1) * (count > ddof)


def standardise(
    values: jax.Array, mask: jax.Array, mean: jax.Array, variance: jax.Array, epsilon: float = 1e-8, shift: bool = True
) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) where the mask is true, 0 elsewhere; without shift, plus the mean."""
    scaled = (values - mean) * jax.lax.rsqrt(variance + epsilon)
    return jnp.where(mask, scaled if shift else scaled + mean, 0.0)


def whiten(values: jax.Array, mask: jax.Array, ddof: int = 1, epsilon: float = 1e-8, shift: bool = True) -> jax.Array:
    """(x - mean) / sqrt(var + epsilon) over what the mask has, 0 elsewhere; same shape.

    ddof 1 is the unbiased variance. Without shift the mean is added again, so that only the spread changes. A single
    value, or equal ones, become 0 (or their mean).
    """
    return standardise(values, mask, *moments(values, mask, ddof), epsilon, shift)


class Running(NamedTuple):
    """How many, mean, and sum of squared distances to the mean of all numbers so far, f32[] each."""

    number: jax.Array
    mean: jax.Array
    squares: jax.Array


def nothing_yet() -> Running:
    """Of no numbers."""
    return Running(jnp.float32(0), jnp.float32(0), jnp.float32(0))


def merged(running: Running, values: jax.Array, mask: jax.Array) -> Running:
    """With what the mask has of `values` (T. Chan, G. Golub and R. LeVeque, 1983):

    n = n_a + n_b,    d = mean_b - mean_a,    mean = mean_a + d n_b / n,    M = M_a + M_b + d^2 n_a n_b / n
    """
    mean, variance = moments(values, mask, 0)
    new = jnp.sum(mask).astype(jnp.float32)
    count = running.number + new
    share = new / jnp.maximum(count, 1)
    distance = jnp.where(new > 0, mean - running.mean, 0.0)
    squares = running.squares + variance * new + distance**2 * running.number * share
    return Running(count, running.mean + distance * share, squares)


def deviation(running: Running, ddof: int = 1) -> jax.Array:
    """Standard deviation f32[]; 1 where the numbers so far are too few or all the same, so that it can divide."""
    variance = running.squares / jnp.maximum(running.number - ddof, 1)
    varies = (running.number > ddof) & (variance > 1e-12 * jnp.maximum(running.mean**2, 1.0))
    return jnp.where(varies, jnp.sqrt(jnp.where(varies, variance, 1.0)), 1.0)


def running_reward_scaling(shift: bool = False, clip: jax.Array | float | None = None, ddof: int = 1) -> Transform:
    """r <- r / std_run, or (r - mean_run) / std_run with shift: of all scored rows so far, this batch's included.

    clip: bound on the size of what comes out (PPO-max, 2307.04964). Changes `reward`, not its components.
    """
    check_number("reward clip", clip, above=0, or_none=True)

    def apply(running: Running, batch: Trajectories) -> tuple[State, Trajectories]:
        r = batch.scores
        running = merged(running, r, ~jnp.isnan(r))
        out = (r - running.mean if shift else r) / deviation(running, ddof)
        return running, batch.replace(reward=out if clip is None else jnp.clip(out, -clip, clip))

    return Transform(nothing_yet, apply)


def normalised_values(inner: Transform, ddof: int = 0) -> Transform:
    """Let the critic predict normalised returns, whatever the scale of rewards.

    `inner` writes advantages and returns from values in units of reward: it gets mean + std v for the critic's v, and
    the returns it writes become (R - mean) / std, what the critic is to learn; `values` are again the critic's. Mean
    and deviation are those of the returns of all earlier batches (0 and 1 at first), so that values and returns of a
    batch are in the same units. The head is not rescaled when they move.
    """

    def apply(state: State, batch: Trajectories) -> tuple[State, Trajectories]:
        running, memory = state
        scale, values = deviation(running, ddof), batch.need("values")
        memory, after = inner.apply(memory, batch.replace(values=running.mean + scale * values))
        R = after.need("returns")
        mask = batch.action_mask & ~jnp.isnan(batch.scores)[:, None]
        after = after.replace(values=values, returns=jnp.where(mask, (R - running.mean) / scale, 0.0))
        return (merged(running, R, mask), memory), after

    return Transform(lambda facts: (nothing_yet(), inner.init(facts)), apply, inner.needs)
