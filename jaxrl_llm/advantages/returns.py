"""Returns over time: token rewards, reward-to-go, generalised advantages, and penalties added to the rewards.

Time steps are a row's actions. Positions outside the mask (padding, environment tokens) are skipped: the backward
recursion passes over them unchanged.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.normalisation import moments, standardise, whiten
from jaxrl_llm.core.annotations import Count, FractionNumber, NonNegative, Number, PositiveNumber, ZeroOrOne
from jaxrl_llm.core.parts import Trajectories, Transform, part, row_means, stateless, stateless_part

__all__ = [
    "at_last_action", "clip_advantages", "discounted_returns", "explained_variance", "gae", "generalised_advantages",
    "head_mean", "last_actions", "last_actions_of_turns", "length_adaptive", "reward_to_go", "scored_actions",
    "sequence_values", "terminal_rewards", "whiten", "whiten_advantages",
]  # fmt: skip

PerRow = Callable[[Trajectories], jax.Array]  # batch -> f32[N] or f32[N, L]


def needed_values(heads: int = 1) -> frozenset[str]:
    """The batch field that the loop must provide: values of a critic with this many heads."""
    return frozenset({"values" if heads == 1 else f"values:{heads}"})


def scored_actions(batch: Trajectories) -> jax.Array:
    """bool[N, L]: the actions of rows that have a score."""
    return batch.action_mask & ~jnp.isnan(batch.scores)[:, None]


def last_actions(batch: Trajectories) -> jax.Array:
    """bool[N, L]: the last action of each row."""
    return batch.action_mask & (batch.action_index == batch.lengths[:, None] - 1)


def at_last_action(values: jax.Array, batch: Trajectories) -> jax.Array:
    """values f32[N, L] at the last action of each row, f32[N]; 0 where there is none."""
    return jnp.sum(jnp.where(last_actions(batch), values, 0.0), axis=1)


def last_actions_of_turns(batch: Trajectories, turns: int) -> jax.Array:
    """bool[N, L]: the last action of each turn 0 .. turns - 1."""
    N, L = batch.tokens.shape
    known = batch.action_mask & (batch.turn >= 0) & (batch.turn < turns)
    key = jnp.where(known, jnp.arange(N)[:, None] * turns + batch.turn, N * turns).reshape(-1)
    position = jnp.broadcast_to(jnp.arange(L), (N, L)).reshape(-1)
    last = jax.ops.segment_max(position, key, num_segments=N * turns + 1)[key]
    return known & (last == position).reshape(N, L)


def terminal_rewards(batch: Trajectories) -> jax.Array:
    """The reward of each action, f32[N, L]: its `token_rewards`, plus the row's score on its last action, plus
    `turn_rewards` [N, K] on the last action of turn k, if the batch has them. 0 on rows without a score."""
    rewards = jnp.where(last_actions(batch), batch.scores[:, None], 0.0)
    if batch.token_rewards is not None:
        rewards = rewards + jnp.where(batch.action_mask, batch.token_rewards, 0.0)
    if batch.turn_rewards is not None:
        turns = batch.turn_rewards.shape[1]
        of_turn = jnp.take_along_axis(jnp.nan_to_num(batch.turn_rewards), jnp.clip(batch.turn, 0, turns - 1), axis=1)
        rewards = rewards + jnp.where(last_actions_of_turns(batch, turns), of_turn, 0.0)
    return jnp.where(scored_actions(batch), rewards, 0.0)


def _per_token(x: Number, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a number, f32[N] or f32[N, L] to f32[N, L]."""
    x = jnp.asarray(x, jnp.float32)
    return jnp.broadcast_to(x[:, None] if x.ndim == 1 else x, shape)


def gae(
    token_rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    gamma: Number = 1.0,
    lam: Number = 0.95,
    *,
    bootstrap: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages and returns, f32[N, L] each (1506.02438), over the actions of each row:

        delta_t = r_t + gamma_t V_{t+1} - V_t,    A_t = delta_t + gamma_t lam_t A_{t+1},    R_t = A_t + V_t

    Positions outside the mask are skipped and get 0. gamma and lam: numbers, f32[N], or f32[N, L] (of the step from t
    to the next action). bootstrap: the value after the last action, f32[N] or a number; 0 if the episode ends there.
    For a truncated row, pass the value of the state that its last action leads to.
    """
    shape = token_rewards.shape
    r, V = (jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (token_rewards, values))
    gammas = _per_token(gamma, shape)
    carried = gammas * _per_token(lam, shape)

    def back(carry: tuple[jax.Array, jax.Array], now: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        V_next, A_next = carry
        r, V, m, g, gl = now
        A = r + g * V_next - V + gl * A_next
        return (jnp.where(m, V, V_next), jnp.where(m, A, A_next)), jnp.where(m, A, 0.0)

    start = (jnp.broadcast_to(jnp.asarray(bootstrap, jnp.float32), shape[:1]), jnp.zeros(shape[:1]))
    _, advantages = jax.lax.scan(back, start, tuple(x.T for x in (r, V, mask, gammas, carried)), reverse=True)
    return advantages.T, advantages.T + V


def reward_to_go(token_rewards: jax.Array, mask: jax.Array, gamma: Number = 1.0) -> jax.Array:
    """G_t = r_t + gamma_t G_{t+1} over the actions of each row, f32[N, L]; 0 outside the mask."""
    return gae(token_rewards, jnp.zeros(token_rewards.shape), mask, gamma, 1.0)[0]


@part
def length_adaptive(alpha: PositiveNumber) -> PerRow:
    """lam = 1 - 1 / (alpha l) for a row of l actions, clipped to [0, 1] (VAPO, 2504.05118); the `lam` of
    `generalised_advantages`. The sum of the GAE coefficients, 1 / (1 - lam) = alpha l, grows with the length."""
    return lambda batch: jnp.clip(1 - 1 / (alpha * jnp.maximum(batch.lengths, 1)), 0.0, 1.0)


@part
def whiten_advantages(
    over: Literal["tokens", "sequences"] = "tokens",
    ddof: ZeroOrOne = 1,
    epsilon: NonNegative = 1e-8,
    shift: bool = True,
) -> Transform:
    """Standardise the advantages over the batch with `whiten`.

    over: "tokens" takes mean and variance over all actions of scored rows that have a weight; "sequences" over the row
    means of these actions. Others get 0.
    """

    def apply(batch: Trajectories) -> Trajectories:
        A = batch.need("advantages")
        mask = scored_actions(batch) & (batch.loss_weights != 0)
        if over == "tokens":
            mean, variance = moments(A, mask, ddof)
        else:
            of_rows = row_means(A, batch.replace(weights=mask.astype(jnp.float32)))
            mean, variance = moments(of_rows, jnp.any(mask, axis=1), ddof)
        return batch.replace(advantages=standardise(A, mask, mean, variance, epsilon, shift))

    return stateless(apply)


@part
def clip_advantages(limit: PositiveNumber) -> Transform:
    """Clip the advantages to [-limit, limit]."""
    return stateless(lambda b: b.replace(advantages=jnp.clip(b.need("advantages"), -limit, limit)))


@stateless_part()
def discounted_returns(batch: Trajectories, gamma: FractionNumber = 1.0) -> Trajectories:
    """Advantages are the reward-to-go of `terminal_rewards`, without a baseline. Also writes `returns`."""
    found = reward_to_go(terminal_rewards(batch), scored_actions(batch), gamma)
    return batch.replace(advantages=found, returns=found)


def head_mean(values: jax.Array) -> jax.Array:
    """Values f32[N, L] of one head, or the mean f32[N, L] of several [N, L, H]."""
    return values if values.ndim == 2 else jnp.mean(values, axis=-1)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """EV = 1 - Var(R - V) / Var(R) over the positions where the mask is true, f32[]: 1 is a perfect critic, 0 one no
    better than a constant. 0 if the returns are constant."""
    _, unexplained = moments(returns - values, mask, 0)
    _, total = moments(returns, mask, 0)
    return jnp.where(total > 1e-12, 1 - unexplained / jnp.where(total > 1e-12, total, 1.0), 0.0)


@part
def generalised_advantages(
    gamma: FractionNumber | PerRow = 1.0,
    lam: FractionNumber | PerRow = 0.95,
    lam_critic: FractionNumber | None = None,
    combine: Callable[[jax.Array], jax.Array] = head_mean,
    bootstrap_truncated: bool = False,
    heads: Count = 1,
) -> Transform:
    """Write advantages and returns: `gae` of `terminal_rewards` and the critic's values; both 0 on unscored rows.

    gamma: a number, or a function of the batch, f32[N, L] of the step from each action to the next, such as
    `between_turns`. lam: a number, or a function of the batch such as `length_adaptive`. lam_critic: a separate lambda
    for the returns (decoupled GAE, VC-PPO, 2503.01491; 1 gives Monte Carlo returns); default: lam. combine: maps the
    values of several heads to one; heads: number of value heads. bootstrap_truncated: bootstrap a truncated row with
    the value at its last action, in place of the unknown value of the next state (T-PPO, 2506.15050); otherwise with 0,
    like any other row. Writes the control "explained_variance", of the returns by the values.
    """

    def apply(batch: Trajectories) -> Trajectories:
        values = combine(batch.need("values"))
        mask = scored_actions(batch)
        rewards = terminal_rewards(batch)
        after = at_last_action(values, batch) * batch.truncated if bootstrap_truncated else jnp.float32(0)
        discount = gamma(batch) if callable(gamma) else gamma
        decay = lam(batch) if callable(lam) else lam
        advantages, returns = gae(rewards, values, mask, discount, decay, bootstrap=after)
        if lam_critic is not None:
            returns = gae(rewards, values, mask, discount, lam_critic, bootstrap=after)[1]
        explained = explained_variance(values, returns, mask)
        return batch.replace(advantages=advantages, returns=returns).with_controls(explained_variance=explained)

    return stateless(apply, needs=needed_values(heads))


@part
def sequence_values(combine: Callable[[jax.Array], jax.Array] = head_mean, heads: Count = 1) -> Transform:
    """A = r - V on every action of a row, r its score and V the value at its last action; `returns` are r.

    Both are 0 on rows without a score. combine: maps the values of several heads to one; heads: number of value heads.
    """

    def apply(batch: Trajectories) -> Trajectories:
        mask = scored_actions(batch)
        V = at_last_action(combine(batch.need("values")), batch)
        A, R = (jnp.where(mask, x[:, None], 0.0) for x in (batch.scores - V, batch.scores))
        explained = explained_variance(V, batch.scores, jnp.any(mask, axis=1))
        return batch.replace(advantages=A, returns=R).with_controls(explained_variance=explained)

    return stateless(apply, needs=needed_values(heads))
