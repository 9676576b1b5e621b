"""Credit of single tokens: baselines of a bucket's tokens at the same action index, and windows of partial completions.

The policy trains on the newest window of these, the critic once they are finished. `info` holds "window" bool[N, L],
the actions sampled in this step, which are the last ones of their row, and "unfinished" bool[N], rows that continue in
the next step. Without these entries every row is finished and its window is all of its actions.
"""

import jax.numpy as jnp

from jaxrl_llm.advantages.returns import gae, reward_to_go, scored_actions, terminal_rewards
from jaxrl_llm.core.annotations import Number
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.log_ratios import log_ratio
from jaxrl_llm.core.parts import Array, Trajectories, stateless_part


def logit_energy(probability: Array, squared_probability: Array) -> Array:
    """|onehot(a) - pi|^2 = 1 - 2 pi(a) + sum_v pi(v)^2: the squared norm of grad log pi(a) with respect to the logits.

    Elementwise; clamped at 0, because rounding can make it negative where pi(a) is 1.
    """
    return jnp.maximum(1 - 2 * probability + squared_probability, 0.0)


def scatter_by_action(values: Array, action_index: Array) -> Array:
    """f32[N, L]: the value of a row's t-th action in column t, 0 in the rest; action_index is -1 off the actions."""
    rows = jnp.arange(values.shape[0])[:, None]
    column = jnp.where(action_index < 0, values.shape[1], action_index)
    return jnp.zeros_like(values).at[rows, column].set(values, mode="drop")


def token_baseline(
    returns: Array, energy: Array, action_index: Array, keys: Array, *, zero_tail: bool = True, epsilon: float = 1e-8
) -> Array:
    """B[g, t] = sum_i G[i, t] W[i, t] / (sum_i W[i, t] + epsilon), f32[N, L], W the energy summed over the actions up
    to t: the minimum-variance baseline for the t-th actions of a bucket, over the rows that have one.

    returns, energy f32[N, L]; action_index int32[N, L], -1 on tokens to ignore; keys int32[N]. Where a single row of a
    bucket reaches t, its return would be its own baseline: zero_tail sets B = 0 there. B = 0 for a bucket of one row.
    """
    known = action_index >= 0

    def by_action(values: Array) -> Array:
        return scatter_by_action(jnp.where(known, values, 0.0), action_index)

    there = by_action(jnp.ones_like(returns))
    G = by_action(returns)
    W = jnp.cumsum(by_action(energy), axis=1) * there
    count, mass, weighted = bucket_sums(keys, there, W, G * W)
    alone = count == 1 if zero_tail else count[:, :1] == 1
    B = jnp.where(alone, 0.0, weighted / (mass + epsilon))
    return jnp.where(known, jnp.take_along_axis(B, jnp.maximum(action_index, 0), axis=1), 0.0)


@stateless_part({"old_logp", "squared_probability"})
def energy_weighted_baseline(
    batch: Trajectories, zero_tail: bool = True, corrected: bool = False, epsilon: float = 1e-8
) -> Trajectories:
    """Advantages are the reward-to-go minus `token_baseline` with `logit_energy` of the old policy.

    corrected: multiply the energy by the squared ratio of the old to the behaviour policy.
    """
    mask = scored_actions(batch)
    old = batch.need("old_logp")
    energy = logit_energy(jnp.exp(jnp.where(mask, old, 0.0)), batch.need("squared_probability"))
    if corrected:
        energy = energy * jnp.exp(2 * log_ratio(old, batch.behaviour_logp, mask))
    G = reward_to_go(terminal_rewards(batch), mask)
    index = jnp.where(mask, batch.action_index, -1)
    B = token_baseline(G, energy, index, batch.group, zero_tail=zero_tail, epsilon=epsilon)
    return batch.replace(advantages=jnp.where(mask, G - B, 0.0), returns=G)


def newest_window(batch: Trajectories) -> Array:
    """bool[N, L]: the actions sampled in this step."""
    window = (batch.info or {}).get("window")
    return batch.action_mask if window is None else batch.action_mask & window


def unfinished_rows(batch: Trajectories) -> Array:
    """bool[N]: rows that continue in the next step."""
    unfinished = (batch.info or {}).get("unfinished")
    return jnp.zeros(batch.tokens.shape[0], bool) if unfinished is None else unfinished


def extended_gae(
    token_rewards: Array, values: Array, window: Array, unfinished: Array, gamma: Number = 1.0, lam: Number = 0.95
) -> Array:
    """Advantages f32[N, L] of the newest window of each row (T-PPO, 2506.15050), 0 elsewhere:

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = sum over j >= t of (gamma lam)^(j-t) delta_j

    over the actions of the window. The bootstrap value after the last action n is V_n where the row is `unfinished`
    bool[N] (the value of the next state is unknown and assumed equal), and 0 where it is finished.
    token_rewards, values f32[N, L]; window bool[N, L]; gamma and lam as in `gae`.
    """
    order = jnp.cumsum(window, axis=1)
    last = window & (order == order[:, -1:])
    after = jnp.sum(jnp.where(last & unfinished[:, None], values, 0.0), axis=1)
    return gae(token_rewards, values, window, gamma, lam, bootstrap=after)[0]
