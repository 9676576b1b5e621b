"""Win rates of a group's samples against each other."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories

WIN_RATE, OPPONENT = "win_rate", "opponent"  # entries of info


def higher_of(gap: jax.Array) -> jax.Array:
    """1 for a higher score, 1/2 for equal ones, 0 for a lower one, by how much it is higher."""
    return 0.5 * (1 + jnp.sign(gap))


def opponents(batch: Trajectories) -> jax.Array:
    """f32[N]: info["opponent"], 1 where a row is an opponent's; 0 where the batch does not say."""
    return (batch.info or {}).get(OPPONENT, jnp.zeros(batch.group.shape))


def win_rates(batch: Trajectories, oracle: Callable[[jax.Array], jax.Array], itself: bool = False) -> jax.Array:
    """f32[N]: info["win_rate"], or where the batch has none the mean over the scored others of the row's group of
    oracle(score - other score), 0 to 1; NaN where there is no other. itself: over the row too, whose oracle(0) counts.
    """
    known = (batch.info or {}).get(WIN_RATE)
    if known is not None:
        return known
    score = batch.scores
    there = ~jnp.isnan(score)
    mates = (batch.group[:, None] == batch.group) & there[:, None] & there
    mates &= itself | ~jnp.eye(len(score), dtype=bool)
    wins = jnp.where(mates, oracle(jnp.nan_to_num(score)[:, None] - jnp.nan_to_num(score)), 0.0)
    count = jnp.sum(mates, axis=1)
    return jnp.where(count > 0, jnp.sum(wins, axis=1) / jnp.maximum(count, 1), jnp.nan)
