"""Credit for partial completions: the policy trains on their newest window, the critic once they are finished.

`info` holds "window" bool[N, L], the actions sampled in this step, which are the last ones of their row, and
"unfinished" bool[N], rows that continue in the next step. Without these entries every row is finished and its window
is all of its actions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import gae
from jaxrl_llm.core.kinds import Number
from jaxrl_llm.core.trajectory import Trajectories


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
