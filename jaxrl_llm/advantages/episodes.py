"""Episodes of one row or several.

Rows of one episode share info["episode"] within their group, and info["first_turn"] is the number of the row's first
turn. Without these each row is an episode.
"""

from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.core.buckets import bucket_sums, joint_key
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.selection.rows import ranks_within

EPISODES = frozenset({"episode", "first_turn"})


def episode_keys(batch: Trajectories) -> Array:
    """int32[N]: equal for rows of one episode."""
    if not set(batch.info or {}) >= EPISODES:
        return jnp.arange(batch.group.shape[0], dtype=jnp.int32)
    return joint_key(batch.group, batch.entry("episode", 0).astype(jnp.int32))


def turns_before(batch: Trajectories) -> Array:
    """int32[N]: turns of the row's episode before the row."""
    return batch.entry("first_turn", 0).astype(jnp.int32)


def one_row_each(batch: Trajectories) -> Array:
    """bool[N]: the last scored row of each episode."""
    before = turns_before(batch).astype(jnp.float32)
    scored = ~jnp.isnan(batch.scores)
    return scored & (ranks_within(episode_keys(batch), before, before, scored) == 0)


def once_per_episode(advantage: Callable[[Trajectories], Array]) -> Callable[[Trajectories], Array]:
    """The advantage f32[N] where an episode counts once, and not with each of its rows, whose rewards are the same.

    It is computed with the episodes' last rows alone, the others being without a reward, and all rows of an episode get
    it. Where each episode is one row, it is `advantage` itself.
    """

    def found(batch: Trajectories) -> Array:
        if not set(batch.info or {}) >= EPISODES:
            return advantage(batch)
        once = one_row_each(batch)

        def of_episode(reward: Array | None) -> Array | None:
            return None if reward is None else jnp.where(once, reward, jnp.nan)

        rewards = None if batch.rewards is None else {name: of_episode(x) for name, x in batch.rewards.items()}
        last_rows = batch.replace(reward=of_episode(batch.reward), rewards=rewards)
        (shared,) = bucket_sums(episode_keys(batch), jnp.where(once, advantage(last_rows), 0.0))
        return jnp.where(jnp.isnan(batch.scores), 0.0, shared)

    return found
