"""Rows that count: those with an action and a score."""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories

WITHOUT_SCORE = ("demonstrated", "measured", "resampled")  # needs: entries of info that mark rows which need no score


def counted_rows(batch: Trajectories, marks: Collection[str] = ()) -> jax.Array:
    """bool[N]: the rows that count: those with an action and a score.

    A row that goes on in the next step (info["unfinished"]) needs no score, nor one that an entry of info in `marks`
    marks, nor any where there are no rewards.
    """
    acted = jnp.any(batch.action_mask, axis=1)
    if batch.reward is None:
        return acted
    known = ~jnp.isnan(batch.reward)
    for mark in ("unfinished", *marks):
        if (marked := (batch.info or {}).get(mark)) is not None:
            known |= marked > 0
    return acted & known


def counted_alone(batch: Trajectories, marks: Collection[str] = ()) -> Trajectories:
    """The batch in which rows that do not count (`counted_rows`) have no actions."""
    kept = counted_rows(batch, marks)

    def alone(action_mask: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        return action_mask & kept[:, None], jnp.where(kept[:, None], turn, -1).astype(turn.dtype)

    # Mostly all rows count. Without a branch XLA repeats the masking in each of the fusions that read these arrays.
    mask, turn = jax.lax.cond(jnp.all(kept), lambda *same: same, alone, batch.action_mask, batch.turn)
    return batch.replace(action_mask=mask, turn=turn)


def without_rows(batch: Trajectories, out: jax.Array) -> Trajectories:
    """The batch with the rows bool[N] excluded, as `rewards.transforms.leave_out` does."""
    weights = jnp.where(out[:, None], 0.0, batch.loss_weights)
    return batch.replace(reward=jnp.where(out, jnp.nan, batch.scores), weights=weights)
