"""Penalties above a threshold, or on the distance to a target.

The KL threshold depends on the trend of the reward: its controller (PID, with a detector of training phases) is a
Transform that runs once per batch and writes controls, which the penalty reads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Metrics, Objective, control
from jaxrl_llm.objectives.averaging.averages import token_mean

Number = jax.Array | float


@part
def distance(penalty: Objective, target: Number, name: str = "above_target") -> Objective:
    """|penalty - target| of the batch's penalty, not a mean of per-token distances.

    The control `name` is the sign, -1, 0 or 1, of penalty - target over the whole batch at the current parameters.
    """

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        batch = penalty.refreshed(outputs, batch)
        return batch.with_controls(**{name: jnp.sign(penalty.function(outputs, batch)[0] - target)})

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        value, metrics = penalty.function(outputs, batch)
        # The token shares of the slices add up to 1, so their shares of the target add up to the target.
        share = token_mean()(jnp.ones(outputs.logp.shape), batch)
        return control(batch, name) * (value - share * target), metrics

    return Objective(objective, penalty.needs, refresh)
