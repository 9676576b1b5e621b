"""Episodes of one row or several: credit and averages that follow an episode over its rows.

Rows of one episode share info["episode"] within their group, and info["first_turn"] is the number of the row's first
turn. Without these each row is an episode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.turns.episodes import episode_keys, turns_before
from jaxrl_llm.advantages.turns.turns import turn_mask
from jaxrl_llm.core.trajectory import Array, Trajectories


def episode_backwards(batch: Trajectories, rewards: Array, gamma: float, carried: Array) -> Array:
    """f32[N, K]: G_t = r_t + gamma G_{t+1} over the turns of an episode, where `carried` bool[N, K]; else G_t = r_t,
    of which the turn before gets nothing. 0 for turns that are not there."""
    mask = turn_mask(batch)
    N, K = mask.shape
    r = jnp.where(mask, rewards, 0.0).reshape(-1)
    key = jnp.broadcast_to(episode_keys(batch)[:, None], (N, K)).reshape(-1)
    row, place = (jnp.broadcast_to(x, (N, K)).reshape(-1) for x in (turns_before(batch)[:, None], jnp.arange(K)))
    there = mask.reshape(-1)
    order = jnp.lexsort((place, row, key, ~there))

    def back(later: tuple[Array, Array], now: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        R, episode = later
        reward, own, known, goes_on = now
        G = reward + jnp.where(goes_on & (episode == own), gamma * R, 0.0)
        return (jnp.where(known & goes_on, G, 0.0), own), jnp.where(known, G, 0.0)

    start = (jnp.zeros(()), jnp.int32(-1))
    inputs = (r[order], key[order], there[order], carried.reshape(-1)[order])
    _, found = jax.lax.scan(back, start, inputs, reverse=True)
    return jnp.zeros(N * K).at[order].set(found).reshape(N, K)
