"""Averages over episodes of one row or several."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.objective import control
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, weighted
from jaxrl_llm.objectives.averaging.averages import Average


@part
def episode_mean() -> Average:
    """Mean over the tokens of each turn, then over the turns of each episode, then over episodes.

    Reads what `advantages.turns.rounds.episode_shares` writes; chain it before. Dropped tokens count as 0.
    """

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        share = jnp.sum(weighted(values, batch) * batch.need("token_share"))
        return share / jnp.maximum(control(batch, "episodes"), 1)

    return Average(average)
