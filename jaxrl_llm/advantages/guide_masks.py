"""Which loss sees which tokens of responses that two policies wrote."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, stateless


@part
def split_at_switch() -> Transform:
    """Train the policy on its own tokens, and the critic on those after the switch.

    info["switch"] f32[N]: the number of a row's first actions that the policy wrote, another policy the rest; below 0,
    or NaN where a rollout failed: all actions are the policy's, and train both. Without it nothing changes. The weights
    of the other policy's tokens become 0, and info["value_weights"] is such that the value loss is a mean over the
    critic's tokens.
    """

    def apply(batch: Trajectories) -> Trajectories:
        switch = (batch.info or {}).get("switch")
        if switch is None:
            return batch
        weights, every = batch.loss_weights, ~(switch >= 0)[:, None]
        own = every | (batch.action_index < switch[:, None])
        valued = jnp.where(jnp.isnan(batch.scores)[:, None], 0.0, weights) * (every | ~own)
        rows = jnp.sum(jnp.any(batch.action_mask, axis=1))
        total = jnp.sum(valued)
        valued = valued * rows / jnp.where(total > 0, total, 1.0)
        return batch.replace(weights=weights * own).with_info(value_weights=valued)

    return stateless(apply)
