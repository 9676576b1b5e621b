"""Rows that are texts of the data set (info["demonstrated"]) beside rows that were sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, stateless


def demonstrated_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: which rows are texts of the data set; none where nothing says so (NaN: of a group that failed)."""
    return (batch.info or {}).get("demonstrated", jnp.zeros(batch.group.shape)) == 1


@part
def demonstrations_apart() -> Transform:
    """Demonstrations have no score, so that they count in no baseline and have no advantage, and old_logp as behaviour.

    Needs "demonstrated" and "old_logp".
    """

    def apply(batch: Trajectories) -> Trajectories:
        rows = demonstrated_rows(batch)
        return batch.replace(
            reward=jnp.where(rows, jnp.nan, batch.scores),
            behaviour_logp=jnp.where(rows[:, None], batch.need("old_logp"), batch.behaviour_logp),
        )

    return stateless(apply, {"demonstrated", "old_logp"})
