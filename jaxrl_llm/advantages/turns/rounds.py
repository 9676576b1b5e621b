"""Episodes of one row or several: credit and averages that follow an episode over its rows.

Rows of one episode share info["episode"] within their group, and info["first_turn"] is the number of the row's first
turn. Without these each row is an episode.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.turns.episodes import EPISODES, episode_keys, one_row_each, turns_before
from jaxrl_llm.advantages.turns.turns import TURNS, OfTurns, on_tokens, rewards_of_turns, turn_mask, turn_numbers
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories, bucket_moments, bucket_sums, joint_key
from jaxrl_llm.core.transform import Transform, stateless
from jaxrl_llm.selection.rows import ranks_within


@part
def episode_shares() -> Transform:
    """Write what `objectives.averaging.episode_averages.episode_mean` reads: info["token_share"] f32[N, L], 1 / (tokens
    of the turn times
    turns of the episode) on actions, and the control "episodes", their number in the batch."""

    def apply(batch: Trajectories) -> Trajectories:
        N, L = batch.tokens.shape
        acted = batch.action_mask & (batch.turn >= 0)
        key = jnp.where(acted, jnp.arange(N)[:, None] * L + jnp.clip(batch.turn, 0, L - 1), N * L).reshape(-1)
        tokens = jax.ops.segment_sum(acted.reshape(-1).astype(jnp.float32), key, num_segments=N * L + 1)[key]
        own = jnp.where(acted, 1 / jnp.maximum(tokens.reshape(N, L), 1), 0.0)
        keys, some = episode_keys(batch), jnp.any(acted, axis=1)
        (turns,) = bucket_sums(keys, jnp.sum(own, axis=1))
        (rows,) = bucket_sums(keys, some.astype(jnp.float32))
        count = jnp.sum(jnp.where(some, 1 / jnp.maximum(rows, 1), 0.0))
        return batch.with_info(token_share=own / jnp.maximum(turns, 1)[:, None]).with_controls(episodes=count)

    return stateless(apply, EPISODES)


@part
def keep_uncertain_turns(share: float = 0.8) -> Transform:
    """Keep the turns of the highest mean entropy, ceil(share n) of the n turns of a group; others get weight 0.

    The entropy is that of the weights before the update. Of equal turns the first are kept. Needs `turns` and
    `state_key`.
    """
    check_number("share", share, least=0, most=1)

    def apply(batch: Trajectories) -> Trajectories:
        mask = turn_mask(batch)
        here = jax.nn.one_hot(turn_numbers(batch), mask.shape[1])  # 0 where no action is
        mean = jnp.einsum("nl,nlk->nk", batch.need("entropy"), here) / jnp.maximum(here.sum(axis=1), 1.0)
        keys = jnp.broadcast_to(batch.group[:, None], mask.shape).reshape(-1)
        first = jnp.arange(mask.size, dtype=jnp.float32)
        rank = ranks_within(keys, mean.reshape(-1), first, mask.reshape(-1)).reshape(mask.shape)
        (count,) = bucket_sums(keys, mask.reshape(-1).astype(jnp.float32))
        gone = mask & (rank >= jnp.ceil(share * count.reshape(mask.shape) - 1e-4))
        before = jnp.ones(batch.tokens.shape, jnp.float32) if batch.weights is None else batch.weights
        return batch.replace(weights=before * (1.0 - on_tokens(gone.astype(jnp.float32), batch)))

    return stateless(apply, TURNS | {"state_key"})


@part
def same_turn_of_episode() -> OfTurns:
    """Keys: turns of a group with the same number in their episodes, also where these are several rows."""

    def keys(batch: Trajectories) -> Array:
        turns = turn_mask(batch).shape[1]
        number = turns_before(batch)[:, None] + jnp.arange(turns)
        return joint_key(jnp.broadcast_to(batch.group[:, None], number.shape), number)

    return keys


@part
def broken_returns(gamma: float = 0.5, matched: float = 0.8) -> OfTurns:
    """Values: returns of turns that end where a turn does not match (UI-S1, 2509.11543). Backwards over an episode,

        R <- r_t + gamma R,    G_t = R    if the turn matches, r_t > matched
        G_t = r_t,             R <- 0     if not

    with r the environment's rewards of turns, also over the rows of an episode; without these the score is that of its
    last turn.
    """
    check_number("gamma", gamma, least=0, most=1)
    check_number("matched", matched)

    def values(batch: Trajectories) -> Array:
        r = rewards_of_turns(batch) if batch.turn_rewards is None else jnp.nan_to_num(batch.turn_rewards)
        return episode_backwards(batch, r, gamma, r > matched)

    return values


@part
def episode_turn_returns(gamma: float = 1.0) -> OfTurns:
    """Values: discounted returns from each turn on, G_t = r_t + gamma G_{t+1}, also over the rows of an episode.

    The score comes with the last turn of the episode, beside the environment's rewards of turns.
    """
    check_number("gamma", gamma, least=0, most=1)

    def values(batch: Trajectories) -> Array:
        last = one_row_each(batch)
        r = rewards_of_turns(batch.replace(reward=jnp.where(last | jnp.isnan(batch.scores), batch.scores, 0.0)))
        return episode_backwards(batch, r, gamma, jnp.ones(r.shape, bool))

    return values


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


@part
def varies_little(values: OfTurns, least: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: rows of groups whose turns' values have a deviation (n - 1) of at most `least`."""
    check_number("least", least, least=0)

    def rows(batch: Trajectories) -> Array:
        mask = turn_mask(batch)
        key = jnp.broadcast_to(batch.group[:, None], mask.shape).reshape(-1)
        deviation = bucket_moments(key, jnp.where(mask, values(batch), jnp.nan).reshape(-1))[2]
        return jnp.max(deviation.reshape(mask.shape), axis=1) <= least

    return rows
