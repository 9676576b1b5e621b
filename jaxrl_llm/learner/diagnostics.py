"""How far the sampler of a batch is from the policy that learns from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import SAMPLED, PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Metrics

OWN = ("kl/behaviour", "mismatch")  # metrics of the difference between sampler and trainer


def diagnostics(outputs: PolicyOutputs, batch: Trajectories) -> Metrics:
    """Token means that are worth seeing whatever the objective."""
    weights, tokens = batch.loss_weights, batch.totals["tokens"] if batch.totals else 1.0
    sampled = (batch.info or {}).get(SAMPLED, batch.behaviour_logp)
    difference = jnp.where(weights != 0, outputs.logp - sampled, 0.0)
    values = {
        "entropy": outputs.entropy,
        "kl/behaviour": jnp.expm1(jnp.clip(difference, -20, 20)) - difference,
        "mismatch": jnp.abs(difference),
    }
    if (marked := (batch.info or {}).get("off_prompt")) is not None:
        # Rows that were sampled under another prompt differ for that reason too.
        off = (marked == 1)[:, None] & (weights != 0)
        apart = {"off_prompt/mismatch": jnp.where(off, values["mismatch"], 0.0), "off_prompt/share": off + 0.0}
        own = {name: jnp.where(off, 0.0, values[name]) for name in OWN}
        values |= own | apart
    return {name: jax.lax.stop_gradient(jnp.sum(x * weights) / tokens) for name, x in values.items()}


def of_own_tokens(metrics: Metrics) -> Metrics:
    """The metrics, where rows were sampled under another prompt: those of each kind as means over its tokens."""
    if "off_prompt/share" not in metrics:
        return metrics
    share = metrics["off_prompt/share"]
    own = {name: metrics[name] / jnp.maximum(1 - share, 1e-9) for name in OWN}
    return {**metrics, **own, "off_prompt/mismatch": metrics["off_prompt/mismatch"] / jnp.maximum(share, 1e-9)}
