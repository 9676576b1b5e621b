"""Credit in batches with rows from a store: advantages that the store gives, and answers worth imitating."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import TOLERANCE, bucket_best, drop_rows, group_advantage, uniform_groups
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments, bucket_sums
from jaxrl_llm.core.transform import Transform, counted, stateless


def replayed_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows from a store; none where the batch has no info["replayed"]."""
    found = (batch.info or {}).get("replayed")
    return jnp.zeros(batch.group.shape, bool) if found is None else found > 0


@part
def keep_stored_advantages() -> Transform:
    """Give replayed rows the advantage of their store, info["replay_advantage"] f32[N]; others keep theirs."""

    def apply(batch: Trajectories) -> Trajectories:
        given = (batch.info or {}).get("replay_advantage")
        given = jnp.zeros(batch.group.shape) if given is None else given
        given = jnp.where(jnp.isnan(batch.scores), 0.0, given)
        here = replayed_rows(batch)[:, None] & batch.action_mask
        return batch.replace(advantages=jnp.where(here, given[:, None], batch.need("advantages")))

    return stateless(apply, {"replayed", "replay_advantage"})


def best_answers(scores: jax.Array, group: jax.Array, stored: jax.Array) -> jax.Array:
    """f32[N]: the weight of each group's best answer if it is better than the mean of the group's own, else 0.

    scores f32[N], NaN where not scored; stored bool[N]: answers that are not the group's own, which count only where
    they are better than all of these. Equal answers share the weight of 1.

    >>> print(best_answers(jnp.array([0.0, 1.0, 0.5]), jnp.zeros(3, jnp.int32), jnp.array([False, False, True])))
    [0. 1. 0.]
    """
    own = jnp.where(stored, jnp.nan, scores)
    count, mean, _ = bucket_moments(group, own)
    better = ~stored | (scores > bucket_best(group, own))
    best = bucket_best(group, jnp.where(better, scores, jnp.nan))
    chosen = better & (scores == best) & (scores - mean > TOLERANCE) & (count > 0)
    (ties,) = bucket_sums(group, chosen.astype(jnp.float32))
    return jnp.where(chosen, 1.0 / jnp.maximum(ties, 1.0), 0.0)


@part
def relative_to_own(ddof: int = 1, epsilon: float = 1e-6) -> Transform:
    """Group-relative advantages of the rows that are not replayed, among these; 0 for the others.

    Writes info["cloned"] f32[N], the weights of `best_answers`.
    """

    def apply(batch: Trajectories) -> Trajectories:
        stored = replayed_rows(batch)
        own = jnp.where(stored, jnp.nan, batch.scores)
        advantage = group_advantage(own, batch.group, ddof=ddof, epsilon=epsilon)
        cloned = best_answers(batch.scores, batch.group, stored)
        return batch.replace(advantages=advantage[:, None] * batch.action_mask).with_info(cloned=cloned)

    return stateless(apply, {"replayed"})


def cloned_rows(batch: Trajectories) -> jax.Array:
    """f32[N]: the weights that `relative_to_own` wrote."""
    return batch.need("cloned")


@part
def rescale_to_informative() -> Transform:
    """Multiply the advantages by the number of groups over that of groups with different rewards.

    Groups without a scored row do not count.
    """

    def apply(batch: Trajectories) -> Trajectories:
        known = ~jnp.isnan(batch.scores)
        (size,) = bucket_sums(batch.group, known.astype(jnp.float32))
        each = jnp.where(known, 1.0 / jnp.maximum(size, 1.0), 0.0)  # sums to 1 over a group
        good = jnp.sum(jnp.where(uniform_groups(batch), 0.0, each))
        factor = jnp.sum(each) / jnp.where(good > 0, good, 1.0)
        return batch.replace(advantages=batch.need("advantages") * factor)

    return stateless(apply)


def varied_groups(scores: jax.Array, group: jax.Array, share: float) -> jax.Array:
    """bool[N]: rows of the ceil(share n) of n groups whose scores vary most; groups that vary equally go together.

    NaN: not scored. Groups without a scored row are none.
    """
    N = group.shape[0]
    _, index = jnp.unique(group, return_inverse=True, size=N)
    known = ~jnp.isnan(scores)
    first = jax.ops.segment_min(jnp.where(known, jnp.arange(N), N), index, num_segments=N)[index] == jnp.arange(N)
    _, _, deviation = bucket_moments(group, scores, ddof=0)
    above = jnp.sum(first & (deviation > deviation[:, None] + TOLERANCE), axis=1)
    return known & (above < jnp.ceil(share * jnp.sum(first) - 1e-4))


@part
def drop_least_varied(share: float = 0.75) -> Transform:
    """Keep the share of groups whose rewards vary most, and all replayed rows: see `varied_groups`."""
    check_number("share", share, least=0, most=1)

    def dropped(batch: Trajectories) -> jax.Array:
        stored = replayed_rows(batch)
        return ~stored & ~varied_groups(jnp.where(stored, jnp.nan, batch.scores), batch.group, share)

    return drop_rows(dropped)


@part
def warm_up_replay(steps: float = 200.0, weight: float = 1.0) -> Transform:
    """Write the control "replay_weight", weight (1 - cos(pi min(t, steps)/steps))/2 in step t = 0, 1, ..."""
    check_number("steps", steps, above=0)
    check_number("weight", weight, least=0)

    def apply(t: jax.Array, batch: Trajectories) -> Trajectories:
        done = jnp.minimum(t.astype(jnp.float32) / steps, 1.0)
        return batch.with_controls(replay_weight=0.5 * weight * (1 - jnp.cos(jnp.pi * done)))

    return counted(apply)
