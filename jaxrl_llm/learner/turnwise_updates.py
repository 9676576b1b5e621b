"""The batches of an update turn by turn: what each phase of `TurnPhases` trains on, and the factor that it leaves."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.algorithm import TURN_FACTOR, turn_in_episode
from jaxrl_llm.core.buckets import bucket_sums, joint_key
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.objectives.off_policy import compounded


def phase_count(batch: Trajectories) -> int:
    """Turns of the longest episode of a batch on the host, at least 1."""
    return max(int(np.max(np.asarray(turn_in_episode(batch)), initial=0)) + 1, 1)


def without_factor(batch: Trajectories) -> Trajectories:
    """The batch, on the host, with a turn factor of 1, as before the first phase."""
    one: Any = np.ones(batch.group.shape, np.float32)
    return batch.with_info(**{TURN_FACTOR: one})


def at_turn(batch: Trajectories, turn: Array) -> Trajectories:
    """The batch in which only the tokens of a turn, int32[], have a weight."""
    chosen = turn_in_episode(batch) == turn
    return batch.replace(weights=jnp.where(chosen, batch.loss_weights, 0.0))


def after_turn(batch: Trajectories, before: Array, turn: Array, clip: float) -> Trajectories:
    """The batch with the factor after the phase of a turn.

    batch: its `old_logp` f32[N, L] is of the parameters after the phase. before: of those before it.
    """
    chosen = turn_in_episode(batch) == turn
    change = jnp.where(chosen, batch.need("old_logp") - before, 0.0)
    info = batch.info or {}
    key = jnp.arange(batch.group.shape[0])
    if "episode" in info and "first_turn" in info:
        key = joint_key(batch.group, jnp.nan_to_num(info["episode"]).astype(jnp.int32))
    total, count = bucket_sums(key, jnp.sum(change, axis=1), jnp.sum(chosen, axis=1).astype(jnp.float32))
    mean = total / jnp.maximum(count, 1)
    factor = compounded(batch.need(TURN_FACTOR), mean[:, None], (count > 0)[:, None], clip)
    return batch.with_info(**{TURN_FACTOR: factor})


def joined(whole: Trajectories, phase: Trajectories, turn: Array) -> Trajectories:
    """The batch of a phase with what earlier phases, in `whole`, computed for the tokens of later turns.

    For records: advantages, weights and old log-probabilities of each token are those with which it was trained.
    """
    later = turn_in_episode(whole) > turn
    fields = {
        name: jnp.where(later, getattr(whole, name), getattr(phase, name))
        for name in ("advantages", "weights", "old_logp")
        if getattr(whole, name) is not None and getattr(phase, name) is not None
    }
    return phase.replace(**fields)
