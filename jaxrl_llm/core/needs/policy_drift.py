"""How far the policy moved since it last answered a prompt, by its probabilities of that answer."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.trajectory import Array, Trajectories


def drift_of(logp: Array, batch: Trajectories) -> Array:
    """f32[N]: the mean over the tokens of a prompt's earlier responses of |logp - behaviour_logp|; NaN without one.

    logp f32[N, L]: under the policy now. The earlier responses are the rows of the batch with info["measured"]; several
    of a prompt count alike.
    """
    measured = (batch.info or {}).get("measured")
    if measured is None:
        return jnp.full(logp.shape[:1], jnp.nan)
    moved = jnp.sum(jnp.where(batch.action_mask, jnp.abs(logp - batch.behaviour_logp), 0.0), axis=1)
    known = (measured > 0) & (batch.lengths > 0)
    mean = jnp.where(known, moved / jnp.maximum(batch.lengths, 1), 0.0)
    count, total = bucket_sums(batch.prompt_id, known.astype(jnp.float32), mean)
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)
