"""Rows of a batch that are not sampled anew: from a store, with the advantages that it gives, or from the data set."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.parts import Trajectories, stateless_part


def replayed_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows from a store; none where the batch has no info["replayed"]."""
    found = (batch.info or {}).get("replayed")
    return jnp.zeros(batch.group.shape, bool) if found is None else found > 0


@stateless_part({"replayed", "replay_advantage"})
def keep_stored_advantages(batch: Trajectories) -> Trajectories:
    """Give replayed rows the advantage of their store, info["replay_advantage"] f32[N]; others keep theirs."""
    given = (batch.info or {}).get("replay_advantage")
    given = jnp.zeros(batch.group.shape) if given is None else given
    given = jnp.where(jnp.isnan(batch.scores), 0.0, given)
    here = replayed_rows(batch)[:, None] & batch.action_mask
    return batch.replace(advantages=jnp.where(here, given[:, None], batch.need("advantages")))


def demonstrated_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: which rows are texts of the data set; none where nothing says so (NaN: of a group that failed)."""
    return (batch.info or {}).get("demonstrated", jnp.zeros(batch.group.shape)) == 1
