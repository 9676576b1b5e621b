"""The formula of `fused_logprob` in plain jax.numpy, with all [M, V] logits. For tests and for reading."""

from __future__ import annotations

import jax
import jax.numpy as jnp

EXCLUDED = -1e30  # stands for the logit -inf outside the support; finite, so that 0 * EXCLUDED is 0 and not NaN


def reference_logprob(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    support_floor: jax.Array | None,
    softcap: float,
    vocab_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of the targets, and entropy, f32[M] each; arguments as in `fused_logprob`, temperature f32[M]."""
    sums = jnp.result_type(jnp.float32, hidden, unembedding)
    z = jnp.einsum("md,vd->mv", hidden, unembedding, preferred_element_type=sums)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    real = jnp.arange(unembedding.shape[0]) < (vocab_size or unembedding.shape[0])
    z = jnp.where(real, z, EXCLUDED)
    logp = jax.nn.log_softmax(z / jax.lax.stop_gradient(temperature)[:, None])
    chosen = (jnp.arange(unembedding.shape[0]) == targets[:, None]) & real
    if support_floor is not None:
        support = (jax.lax.stop_gradient(logp) >= support_floor[:, None]) | chosen
        logp = jax.nn.log_softmax(jnp.where(support, logp, EXCLUDED))
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
    return jnp.max(logp, axis=1, where=chosen, initial=-jnp.inf), entropy
