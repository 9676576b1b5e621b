"""Losses on lists and pairs of the samples of a prompt, whose scores are log-probabilities of whole sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, weighted


def log_ratio_sum(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
    """The weighted sum of each row's log-ratios to the behaviour policy, f32[N]: log pi(y) / q(y) of the sequence."""
    return sequence_log_ratios(outputs.logp, batch)


def sequence_log_ratios(logp: jax.Array, batch: Trajectories) -> jax.Array:
    """The weighted sum of each row's log-ratios of `logp` f32[N, L] to the behaviour policy, f32[N]."""
    inside = batch.loss_weights != 0
    return jnp.sum(weighted(jnp.where(inside, logp, 0.0) - jnp.where(inside, batch.behaviour_logp, 0.0), batch), axis=1)


def scored_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows with a score and a weight in the loss."""
    return ~jnp.isnan(batch.scores) & jnp.any(batch.loss_weights != 0, axis=1)
