"""Credit by turn: rewards, returns and baselines of the turns of episodes, in arrays [N, K] of N rows and K turns.

One baseline by key serves all: turns that share a key are compared with each other. Keys say what is alike: the same
state of the environment, the same last states, the same index, or a random group. An environment's rewards of turns are
the batch's `turn_rewards`; the row's score comes with its last turn. NaN marks a row without a score: its turns get 0
and count in no baseline. So does a turn whose own reward is NaN, in returns of earlier turns as 0.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.episodes import episode_keys, turns_before
from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.core.annotations import Count, Divisor, Fraction, MomentsOver
from jaxrl_llm.core.buckets import bucket_moments, joint_key
from jaxrl_llm.core.parts import Array, Trajectories, Transform, batch_part, part, stateless
from jaxrl_llm.utils.errors import InputError

OfTurns = Callable[[Trajectories], Array]
"""A function of the batch that gives a number for each turn, [N, K]."""
TURNS = frozenset({"turns"})


def turn_count(batch: Trajectories) -> int:
    """K, the turns that the batch has room for: those of its `turn_rewards` or `state_key`; 1 without either."""
    for field in (batch.turn_rewards, batch.state_key):
        if field is not None:
            return int(field.shape[1])
    return 1


def turn_numbers(batch: Trajectories) -> Array:
    """int32[N, L]: the turn of each action, -1 elsewhere; an episode is one turn if nothing is known of its turns."""
    known = batch.turn_rewards is not None or batch.state_key is not None
    return jnp.where(batch.action_mask & (batch.turn >= 0), batch.turn if known else 0, -1)


def acted_turns(batch: Trajectories) -> Array:
    """bool[N, K]: the turns in which a row has an action."""
    turns, number = turn_count(batch), turn_numbers(batch)
    return jax.nn.one_hot(jnp.where(number >= 0, number, turns), turns, dtype=jnp.float32).max(axis=1) > 0


def turns_of_scored(batch: Trajectories) -> Array:
    """bool[N, K]: the turns in which a scored row has an action."""
    return acted_turns(batch) & ~jnp.isnan(batch.scores)[:, None]


def turn_mask(batch: Trajectories) -> Array:
    """bool[N, K]: the turns that count: a scored row has an action in them, and their own reward is not NaN."""
    found = turns_of_scored(batch)
    return found if batch.turn_rewards is None else found & ~jnp.isnan(batch.turn_rewards)


def rewards_of_turns(batch: Trajectories) -> Array:
    """f32[N, K]: the environment's rewards of turns, and on the last turn of each row its score too."""
    mask = turns_of_scored(batch)
    number = jnp.where(mask, jnp.arange(mask.shape[1]), -1)
    last = mask & (number == number.max(axis=1, keepdims=True))
    own = 0.0 if batch.turn_rewards is None else jnp.nan_to_num(batch.turn_rewards)
    return jnp.where(mask, own + jnp.where(last, jnp.nan_to_num(batch.scores)[:, None], 0.0), 0.0)


def episode_returns(batch: Trajectories) -> Array:
    """f32[N]: a row's score and all rewards of its turns; NaN without a score."""
    return jnp.where(jnp.isnan(batch.scores), jnp.nan, jnp.sum(rewards_of_turns(batch), axis=1))


def returns_of_turns(rewards: Array, mask: Array, gamma: float | Array = 1.0) -> Array:
    """G_t = sum_{u >= t} gamma^(u - t) r_u over the turns f32[N, K]; 0 outside the mask.

    >>> returns_of_turns(jnp.array([[0.0, 0.0, 1.0]]), jnp.ones((1, 3), bool), 0.5).tolist()
    [[0.25, 0.5, 1.0]]
    """

    def back(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, there = now
        total = jnp.where(there, reward + gamma * later, later)
        return total, jnp.where(there, total, 0.0)

    turns = (jnp.where(mask, rewards, 0.0).T, mask.T)
    return jax.lax.scan(back, jnp.zeros(rewards.shape[0]), turns, reverse=True)[1].T


def on_tokens(values: Array, batch: Trajectories) -> Array:
    """f32[N, L]: the value of its turn, values f32[N, K], on each action; 0 elsewhere."""
    turns = values.shape[1]
    number = turn_numbers(batch)
    known = (number >= 0) & (number < turns)
    return jnp.where(known, jnp.take_along_axis(values, jnp.clip(number, 0, turns - 1), axis=1), 0.0)


def ends_of_turns(batch: Trajectories) -> tuple[Array, Array]:
    """int32[N, K] each: the places of the first and of the last action of each turn; 0 where there is none."""
    L = batch.tokens.shape[1]
    own = turn_numbers(batch)[:, :, None] == jnp.arange(turn_count(batch))
    place = jnp.arange(L)[None, :, None]
    first = jnp.min(jnp.where(own, place, L), axis=1)
    last = jnp.max(jnp.where(own, place, 0), axis=1)
    return jnp.where(first < L, first, 0).astype(jnp.int32), last.astype(jnp.int32)


def above_buckets(
    values: Array,
    keys: Array,
    mask: Array,
    scale: Divisor = "none",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    ddof: int = 1,
    epsilon: float = 1e-6,
    alone: Literal["zero", "value"] = "zero",
) -> Array:
    """f32[N, K]: values of turns less the mean of the turns with the same key, int32[N, K]; 0 outside the mask.

    scale "std" divides by the bucket's standard deviation + epsilon. A turn that is alone in its bucket gets 0, or with
    alone "value" its value, as if the mean of no others were 0.
    """
    flat = jnp.where(mask, values, jnp.nan).reshape(-1)
    above = above_baseline(flat, keys.reshape(-1), baseline)
    count, _, deviation = bucket_moments(keys.reshape(-1), flat, ddof)
    if scale == "std":
        above = above / (deviation + epsilon)
    if alone == "value":  # as it is: a bucket of one has no deviation to divide it by
        above = jnp.where((count == 1) & ~jnp.isnan(flat), flat, above)
    return above.reshape(values.shape)


def group_keys(batch: Trajectories, turns: int) -> Array:
    """The group of each row as the key of its turns, int32[N, turns]."""
    return jnp.broadcast_to(batch.group[:, None], (batch.group.shape[0], turns))


@batch_part
def same_state(batch: Trajectories, last: Count = 1) -> Array:
    """Keys: turns of a group whose last `last` states are the same, the newest being the one before the turn.

    Reads `state_key`. A turn with fewer turns before it is alike only to others at the same index.
    """
    states = batch.need("state_key").astype(jnp.uint32)
    turns = states.shape[1]
    joint = group_keys(batch, turns)
    for back in range(last):
        past = jnp.pad(states, ((0, 0), (back, 0)))[:, :turns]
        missing = jnp.broadcast_to(jnp.arange(turns) < back, states.shape).astype(jnp.int32)
        joint = joint_key(joint, jax.lax.bitcast_convert_type(past, jnp.int32), missing)
    return joint


@part
def turn_returns(gamma: Fraction = 1.0) -> OfTurns:
    """Values: the discounted return from each turn on."""
    return lambda batch: returns_of_turns(rewards_of_turns(batch), turns_of_scored(batch), gamma)


@part
def turn_rewards() -> OfTurns:
    """Values: the environment's rewards of turns alone."""
    return lambda batch: jnp.where(turn_mask(batch), jnp.nan_to_num(batch.need("turn_rewards")), 0.0)


@batch_part
def compared(
    batch: Trajectories,
    values: OfTurns,
    keys: OfTurns,
    scale: Divisor = "none",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    ddof: int = 1,
    epsilon: float = 1e-6,
    alone: Literal["zero", "value"] = "zero",
) -> Array:
    """Advantages of turns: the values less the baseline of their key; see `above_buckets`."""
    return above_buckets(values(batch), keys(batch), turn_mask(batch), scale, baseline, ddof, epsilon, alone)


@batch_part
def of_episode(
    batch: Trajectories,
    scale: Divisor = "none",
    over: MomentsOver = "rows",
    epsilon: float = 1e-6,
    of: Literal["return", "score"] = "return",
    baseline: Literal["mean", "leave_one_out"] = "mean",
) -> Array:
    """Advantages of turns: that of their episode, its return less the mean of its group's.

    over: whether each row counts once in the mean, or each of its turns does. of: the return has the rewards of turns
    beside the row's score. baseline: of the whole group, or of the others.
    """
    mask = turn_mask(batch)
    returns = episode_returns(batch) if of == "return" else batch.scores
    spread = jnp.broadcast_to(returns[:, None], mask.shape)
    if over == "turns":
        return above_buckets(spread, group_keys(batch, mask.shape[1]), mask, scale, baseline, epsilon=epsilon)
    above = above_baseline(returns, batch.group, baseline)
    if scale == "std":
        above = above / (bucket_moments(batch.group, returns)[2] + epsilon)
    return jnp.where(mask, above[:, None], 0.0)


@part
def turn_advantages(*terms: OfTurns, weights: tuple[float, ...] = (), needs: Iterable[str] = ()) -> Transform:
    """Advantages of actions: the weighted sum of the turns' advantages of several terms; weights: by default 1 each.

    Needs turns, and the `needs` of the terms. InputError for other numbers of weights than terms.
    """
    if weights and len(weights) != len(terms):
        raise InputError(f"{len(terms)} terms have {len(weights)} weights: give one for each")
    factors = weights or (1.0,) * len(terms)

    def apply(batch: Trajectories) -> Trajectories:
        total = sum(factor * term(batch) for factor, term in zip(factors, terms, strict=True))
        return batch.replace(advantages=on_tokens(jnp.asarray(total), batch))

    return stateless(apply, TURNS | frozenset(needs))


@part
def where_given(
    field: Literal["state_key", "turn_rewards"], term: OfTurns, otherwise: OfTurns | None = None
) -> OfTurns:
    """A term of turns that reads a field of the batch; without that field `otherwise`, by default 0.

    For methods that need the field: a run without it is refused unless it goes without by name.
    """

    def advantage(batch: Trajectories) -> Array:
        if getattr(batch, field) is not None:
            return term(batch)
        return jnp.zeros(turn_mask(batch).shape) if otherwise is None else otherwise(batch)

    return advantage


@part
def needs_turns(fresh: bool = False) -> Transform:
    """Need episodes of several turns; the batch stays as it is. fresh: each turn is a row with a prompt of its own."""
    return stateless(lambda batch: batch, TURNS | ({"fresh_prompts"} if fresh else set()))


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
