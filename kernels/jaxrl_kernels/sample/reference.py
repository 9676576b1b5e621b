"""The formula of `fused_sample` in plain jax.numpy, with all [N, V] logits and noise. For tests and for reading."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.logprob.reference import EXCLUDED
from jaxrl_kernels.sample.noise import BLOCK, OF_BLOCKS, OF_TOKENS, bits_at, gumbel
from jaxrl_kernels.sample.tile import Inputs


def reference_sample(inputs: Inputs, softcap: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(token int32[N], logp f32[N], entropy f32[N])."""
    hidden, unembedding, keys, temperature, allowed = inputs
    vocabulary = unembedding.shape[0]
    z = jnp.einsum("nd,vd->nv", hidden, unembedding, preferred_element_type=jnp.float32)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    greedy = (temperature == 0)[:, None]
    z = z / jnp.where(greedy, 1.0, temperature[:, None])
    z = jnp.maximum(z if allowed is None else jnp.where(allowed, z, EXCLUDED), EXCLUDED)

    number = -(-vocabulary // BLOCK)
    padding = ((0, 0), (0, number * BLOCK - vocabulary))
    blocks = jnp.pad(z, padding, constant_values=EXCLUDED).reshape(len(z), number, BLOCK)
    sums = jax.nn.logsumexp(blocks, axis=2) + gumbel(bits_at(keys, OF_BLOCKS, jnp.arange(number)[None]))
    block = jnp.argmax(jnp.where(greedy, jnp.max(blocks, axis=2), sums), axis=1)
    in_block = jnp.arange(vocabulary) // BLOCK == block[:, None]
    within = z - jnp.max(z, axis=1, where=in_block, initial=EXCLUDED, keepdims=True)
    noisy = within + gumbel(bits_at(keys, OF_TOKENS, jnp.arange(vocabulary)[None]))
    token = jnp.argmax(jnp.where(in_block, jnp.where(greedy, within, noisy), -jnp.inf), axis=1).astype(jnp.int32)

    logp = jax.nn.log_softmax(z)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
    chosen = jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]
    nothing = jnp.max(z, axis=1) <= EXCLUDED
    token = jnp.where(nothing | jnp.isnan(chosen), -1, token)
    return token, jnp.where(nothing, -jnp.inf, chosen), jnp.where(nothing, 0.0, entropy)
