"""Group-relative credit: a sample is as good as it is better than the other samples of its prompt."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.buckets import bucket_moments
from jaxrl_llm.errors import InputError
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import Transform, stateless

SCALES = ("std", "none")


def group_advantage(
    reward: jax.Array, group: jax.Array, *, scale: str = "std", ddof: int = 1, epsilon: float = 1e-6
) -> jax.Array:
    """A_i = (r_i - mean_g) / (std_g + epsilon), f32[N], over the samples of the same group (DeepSeekMath, 2402.03300).

    reward f32[N], NaN where not scored (advantage 0, left out of mean and std); group int32[N]; groups may differ in
    size. scale "none" leaves out the division. ddof: the paper does not say; 1 is what implementations use. A group of
    one, or of equal rewards, has advantage 0. Raises InputError for a scale that is not one of SCALES.

    >>> print(group_advantage(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.zeros(4, jnp.int32)).round(4))
    [ 0.866 -0.866 -0.866  0.866]
    """
    _check_scale(scale)
    _, mean, deviation = bucket_moments(group, reward, ddof)
    centred = jnp.where(jnp.isnan(reward), 0.0, reward - mean)
    # Rewards that differ by rounding alone are equal; a small epsilon would blow the difference up.
    if scale == "std":
        return jnp.where(deviation > 1e-7 * jnp.maximum(jnp.abs(mean), 1.0), centred / (deviation + epsilon), 0.0)
    return centred


def group_relative(scale: str = "std", ddof: int = 1, epsilon: float = 1e-6) -> Transform:
    """Write `group_advantage` of the combined reward on every action token of the sample.

    Raises InputError for a scale that is not one of SCALES.
    """
    _check_scale(scale)
    return on_actions(lambda b: group_advantage(b.scores, b.group, scale=scale, ddof=ddof, epsilon=epsilon))


def _check_scale(scale: str) -> None:
    if scale not in SCALES:
        raise InputError(f"the scale of group-relative advantages is {scale!r}, but must be one of {', '.join(SCALES)}")


def on_actions(advantage: Callable[[Trajectories], jax.Array]) -> Transform:
    """The transform that gives every action token its sample's advantage f32[N]."""
    return stateless(lambda b: b.replace(advantages=advantage(b)[:, None] * b.action_mask))


def uniform_groups(batch: Trajectories) -> jax.Array:
    """bool[N]: the samples of groups without learning signal, in which all rewards are equal (or there is one)."""
    _, mean, deviation = bucket_moments(batch.group, batch.scores)
    return deviation <= 1e-7 * jnp.maximum(jnp.abs(mean), 1.0)


def drop_uniform_groups() -> Transform:
    """Give the tokens of uniform groups the weight 0, so that they count in no average (DAPO, 2503.14476).

    Where every group is uniform the weights are all 0 and so is the loss.
    """

    def drop(batch: Trajectories) -> Trajectories:
        kept = jnp.where(uniform_groups(batch), 0.0, 1.0)[:, None]
        before = jnp.ones(batch.tokens.shape, jnp.float32) if batch.weights is None else batch.weights
        return batch.replace(weights=before * kept)

    return stateless(drop)
