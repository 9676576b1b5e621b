"""Losses that regress ratios or log-probabilities onto targets, and masked, weighted score functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.choices import Number


def one_token_loss(logp: jax.Array, label: jax.Array, samples: jax.Array, penalty: Number = -0.1) -> jax.Array:
    """-(1/K) sum_k R(a_k) log p(a_k), R = 1 for the label and `penalty` for other tokens (2509.26313), f32[...].

    logp [..., V], label int [...], samples int [..., K].
    """
    reward = jnp.where(samples == label[..., None], 1.0, penalty)
    return -jnp.mean(reward * jnp.take_along_axis(logp, samples, axis=-1), axis=-1)


def expected_one_token_loss(
    logp: jax.Array, label: jax.Array, penalty: Number = -0.1, temperature: Number = 1.0
) -> jax.Array:
    """-sum_a q(a) R(a) log p(a), q = sg(softmax(logp / temperature)): the expected `one_token_loss`, f32[...]."""
    q = jax.lax.stop_gradient(jax.nn.softmax(logp / temperature, axis=-1))
    reward = jnp.where(jax.nn.one_hot(label, logp.shape[-1], dtype=bool), 1.0, penalty)
    return -jnp.sum(q * reward * logp, axis=-1)
