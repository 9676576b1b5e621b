"""Rows that are texts of the data set (info["demonstrated"]) beside rows that were sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories


def demonstrated_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: which rows are texts of the data set; none where nothing says so (NaN: of a group that failed)."""
    return (batch.info or {}).get("demonstrated", jnp.zeros(batch.group.shape)) == 1
