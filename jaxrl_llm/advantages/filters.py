"""Rows that are left out of the loss, of uniform groups or with small advantages; and rows that were not sampled."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.group import TOLERANCE
from jaxrl_llm.core.annotations import NonNegative
from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Trajectories, Transform, part, stateless, stateless_part


def uniform_groups(batch: Trajectories) -> Array:
    """bool[N]: samples of groups without learning signal, whose rewards are all equal (or which have a single one)."""
    if isinstance(batch.group, np.ndarray) and isinstance(batch.reward, np.ndarray):
        return _uniform_on_host(batch)
    _, mean, deviation = bucket_moments(batch.group, batch.scores)
    return deviation <= TOLERANCE * jnp.maximum(jnp.abs(mean), 1.0)


def _uniform_on_host(batch: Trajectories) -> np.ndarray:
    """`uniform_groups` of a batch that rollouts gave, whose number of rows differs: nothing is compiled."""
    reward, group = np.asarray(batch.reward, np.float64), np.asarray(batch.group)
    scored = np.asarray(batch.action_mask).any(axis=1) & ~np.isnan(reward)
    uniform = np.ones(len(reward), bool)
    for name in np.unique(group):
        own = reward[(group == name) & scored]
        if own.size > 1 and own.std(ddof=1) > TOLERANCE * max(abs(own.mean()), 1.0):
            uniform[group == name] = False
    return uniform


def mixed_groups(batch: Trajectories) -> Array:
    """bool[N]: samples of groups with a learning signal, whose rewards are not all equal."""
    return ~uniform_groups(batch)


def truncated_rows(batch: Trajectories) -> Array:
    """bool[N]: samples that ran out of their budget before the end of the answer."""
    return batch.truncated


@part
def drop_rows(dropped: Callable[[Trajectories], Array]) -> Transform:
    """Set the weights of the rows where `dropped(batch)` bool[N] to 0, so that no average counts their tokens.

    If all rows are dropped, all weights and the loss are 0.
    """
    require_function("the rows to drop", dropped)
    return stateless(lambda b: b.replace(weights=jnp.where(dropped(b)[:, None], 0.0, b.loss_weights)))


@part
def drop_uniform_groups() -> Transform:
    """Drop the rows of uniform groups (DAPO, 2503.14476)."""
    return drop_rows(uniform_groups)


@part
def drop_small_advantages(least: NonNegative) -> Transform:
    """Drop the rows whose advantages are all smaller than `least` in absolute value (2502.01600)."""
    return drop_rows(lambda b: jnp.max(jnp.abs(b.need("advantages")) * b.action_mask, axis=1) < least)


def replayed_rows(batch: Trajectories) -> Array:
    """bool[N]: rows from a store; none where the batch has no info["replayed"]."""
    return batch.entry("replayed", 0) > 0


@stateless_part({"replayed", "replay_advantage"})
def keep_stored_advantages(batch: Trajectories) -> Trajectories:
    """Give replayed rows the advantage of their store, info["replay_advantage"] f32[N]; others keep theirs."""
    given = (batch.info or {}).get("replay_advantage", jnp.zeros(batch.group.shape))
    given = jnp.where(jnp.isnan(batch.scores), 0.0, given)
    here = replayed_rows(batch)[:, None] & batch.action_mask
    return batch.replace(advantages=jnp.where(here, given[:, None], batch.need("advantages")))


def demonstrated_rows(batch: Trajectories) -> Array:
    """bool[N]: which rows are texts of the data set; none where nothing says so (NaN: of a group that failed)."""
    return batch.entry("demonstrated", 0) == 1
