"""Credit for partial completions: the policy trains on their newest window, the critic once they are finished.

`info` holds "window" bool[N, L], the actions sampled in this step, which are the last ones of their row, and
"unfinished" bool[N], rows that continue in the next step. Without these entries every row is finished and its window
is all of its actions.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import (
    explained_variance,
    gae,
    head_mean,
    needed_values,
    reward_to_go,
    scored_actions,
    terminal_rewards,
)
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, totals_of
from jaxrl_llm.core.transform import Transform, stateless

Number = jax.Array | float


def newest_window(batch: Trajectories) -> jax.Array:
    """bool[N, L]: the actions sampled in this step."""
    window = (batch.info or {}).get("window")
    return batch.action_mask if window is None else batch.action_mask & window


def unfinished_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows that continue in the next step."""
    unfinished = (batch.info or {}).get("unfinished")
    return jnp.zeros(batch.tokens.shape[0], bool) if unfinished is None else unfinished


def extended_gae(
    token_rewards: jax.Array,
    values: jax.Array,
    window: jax.Array,
    unfinished: jax.Array,
    gamma: Number = 1.0,
    lam: Number = 0.95,
) -> jax.Array:
    """Advantages f32[N, L] of the newest window of each row (T-PPO, 2506.15050), 0 elsewhere:

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = sum over j >= t of (gamma lam)^(j-t) delta_j

    over the actions of the window. The bootstrap value after the last action n is V_n where the row is `unfinished`
    bool[N] (the value of the next state is unscored_batch and assumed equal), and 0 where it is finished.
    token_rewards, values f32[N, L]; window bool[N, L]; gamma and lam as in `gae`.
    """
    order = jnp.cumsum(window, axis=1)
    last = window & (order == order[:, -1:])
    after = jnp.sum(jnp.where(last & unfinished[:, None], values, 0.0), axis=1)
    return gae(token_rewards, values, window, gamma, lam, bootstrap=after)[0]


@part
def windowed_advantages(
    gamma: Number = 1.0,
    lam: Number = 0.95,
    combine: Callable[[jax.Array], jax.Array] = head_mean,
    heads: int = 1,
) -> Transform:
    """`extended_gae` of `terminal_rewards` for the policy, Monte Carlo returns for the critic.

    Only the newest window has advantages and keeps its weights. Rows finished in this step have `returns`, the
    undiscounted reward-to-go of each of their actions, in all their windows; the critic does not train on other rows.
    info["value_weights"] f32[N, L] are the weights of `value_loss`: equal on the tokens that the critic trains on, 0
    elsewhere, their sum the number of rows with an action; all 0 if no row was finished. Finished rows without a score
    have advantages 0. The reward of an unfinished row is ignored. combine: maps the values of several heads to one;
    heads: number of value heads. Writes the control "explained_variance", of the returns by the values.
    """
    check_number("gamma", gamma, least=0, most=1)
    check_number("lam", lam, least=0, most=1)

    def apply(batch: Trajectories) -> Trajectories:
        values, window, unfinished = combine(batch.need("values")), newest_window(batch), unfinished_rows(batch)
        # An unfinished row has no terminal reward yet.
        known = batch.replace(reward=jnp.where(unfinished, 0.0, batch.scores))
        rewards, scored = terminal_rewards(known), scored_actions(known)
        advantages = extended_gae(rewards, values, window & scored, unfinished, gamma, lam)
        ended = (jnp.any(window, axis=1) & ~unfinished)[:, None] & scored
        returns = jnp.where(ended, reward_to_go(rewards, ended), 0.0)
        before = jnp.ones(batch.tokens.shape) if batch.weights is None else batch.weights
        trained = jnp.where(ended, before, 0.0)
        total, rows = jnp.sum(trained), totals_of(batch.replace(totals=None))["rows"]
        return (
            batch.replace(advantages=advantages, returns=returns, weights=before * window)
            .with_info(value_weights=jnp.where(total > 0, trained * rows / jnp.where(total > 0, total, 1.0), 0.0))
            .with_controls(explained_variance=explained_variance(values, returns, ended))
        )

    return stateless(apply, needs=needed_values(heads))
