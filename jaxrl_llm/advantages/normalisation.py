"""Normalisation by mean and variance: of a masked array, or running over all batches so far (Welford)."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import PositiveNumber
from jaxrl_llm.core.buckets import joint_key
from jaxrl_llm.core.parts import State, Trajectories, Transform, part


def moments(values: jax.Array, mask: jax.Array, ddof: int = 1) -> tuple[jax.Array, jax.Array]:
    """Mean and variance f32[] of the values where the mask is true; variance 0 for at most `ddof` such values.

    Both are computed from the differences to the maximum, so that equal values, however large, have variance exactly 0.
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
    """(x - mean) / sqrt(variance + epsilon) where the mask is true, 0 elsewhere; shift False adds the mean again."""
    scaled = (values - mean) * jax.lax.rsqrt(variance + epsilon)
    return jnp.where(mask, scaled if shift else scaled + mean, 0.0)


def whiten(values: jax.Array, mask: jax.Array, ddof: int = 1, epsilon: float = 1e-8, shift: bool = True) -> jax.Array:
    """(x - mean) / sqrt(var + epsilon), with moments over the mask; 0 outside the mask; same shape.

    ddof 1: unbiased variance. shift False adds the mean again, so that only the scale changes. A single value, or equal
    values, become 0 (or their mean).
    """
    return standardise(values, mask, *moments(values, mask, ddof), epsilon, shift)


class RunningMoments(NamedTuple):
    """Number, mean, and sum of squared differences to the mean of all values so far, f32[] each."""

    samples: jax.Array
    mean: jax.Array
    squares: jax.Array


def empty_moments() -> RunningMoments:
    """The moments of no values."""
    return RunningMoments(jnp.float32(0), jnp.float32(0), jnp.float32(0))


def update_moments(running: RunningMoments, values: jax.Array, mask: jax.Array) -> RunningMoments:
    """Merge in the values where the mask is true (T. Chan, G. Golub and R. LeVeque, 1983):

    n = n_a + n_b,    d = mean_b - mean_a,    mean = mean_a + d n_b / n,    M = M_a + M_b + d^2 n_a n_b / n
    """
    mean, variance = moments(values, mask, 0)
    new = jnp.sum(mask).astype(jnp.float32)
    count = running.samples + new
    share = new / jnp.maximum(count, 1)
    distance = jnp.where(new > 0, mean - running.mean, 0.0)
    squares = running.squares + variance * new + distance**2 * running.samples * share
    return RunningMoments(count, running.mean + distance * share, squares)


def running_std(running: RunningMoments, ddof: int = 1) -> jax.Array:
    """Standard deviation f32[]; 1 if the values so far are too few or all equal, so that it is a safe divisor."""
    variance = running.squares / jnp.maximum(running.samples - ddof, 1)
    varies = (running.samples > ddof) & (variance > 1e-12 * jnp.maximum(running.mean**2, 1.0))
    return jnp.where(varies, jnp.sqrt(jnp.where(varies, variance, 1.0)), 1.0)


@part
def running_reward_scaling(shift: bool = False, clip: PositiveNumber | None = None, ddof: int = 1) -> Transform:
    """r <- r / std, or (r - mean) / std with shift, with moments over all scored rows so far, including this batch.

    clip: bound on the absolute value of the result (PPO-max, 2307.04964). Changes `reward`, not its components.
    """

    def apply(running: RunningMoments, batch: Trajectories) -> tuple[State, Trajectories]:
        r = batch.scores
        running = update_moments(running, r, ~jnp.isnan(r))
        out = (r - running.mean if shift else r) / running_std(running, ddof)
        return running, batch.replace(reward=out if clip is None else jnp.clip(out, -clip, clip))

    return Transform(empty_moments, apply)


@part
def normalised_values(inner: Transform, ddof: int = 0) -> Transform:
    """Let the critic predict normalised returns, so that it is independent of the scale of rewards.

    `inner` writes advantages and returns from values in units of reward: it receives mean + std v for the critic's
    output v, and the returns that it writes become (R - mean) / std, the critic's targets; `values` are left as v. The
    moments are over the returns of all earlier batches (0 and 1 at first), so that values and returns of a batch have
    the same units. The value head is not rescaled when the moments change.
    """

    def apply(state: State, batch: Trajectories) -> tuple[State, Trajectories]:
        running, memory = state
        scale = running_std(running, ddof)
        values = batch.need("values")
        memory, after = inner.apply(memory, batch.replace(values=running.mean + scale * values))
        R = after.need("returns")
        mask = batch.action_mask & ~jnp.isnan(batch.scores)[:, None]
        after = after.replace(values=values, returns=jnp.where(mask, (R - running.mean) / scale, 0.0))
        return (update_moments(running, R, mask), memory), after

    return Transform(lambda facts: (empty_moments(), inner.init(facts)), apply, inner.needs)


@part
def apart(kind: Callable[[Trajectories], jax.Array | None], credit: Transform, needs: Iterable[str] = ()) -> Transform:
    """A transform for which rows of a group with different kind(batch) f32[N] are different groups; None: all alike."""

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        own = kind(batch)
        groups = batch.group if own is None else joint_key(batch.group, own.astype(jnp.float32))
        state, out = credit.apply(state, batch.replace(group=groups))
        return state, out.replace(group=batch.group)

    return Transform(credit.init, apply, credit.needs | frozenset(needs))
