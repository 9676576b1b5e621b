"""One token from logits: the noise that chooses it, its log-probability, and the entropy of its distribution."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.sampling.filters import Filters, keep, support_floor


class Drawn(NamedTuple):
    """What is remembered of one token of each row."""

    token: jax.Array  # int32[N]
    logp: jax.Array  # f32[N] under the distribution that it was drawn from
    entropy: jax.Array  # f32[N] of that distribution, nats
    floor: jax.Array  # f32[N] least log-probability that the filters kept, -inf without filters


def token_keys(key: jax.Array, prompt_id: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
    """A random key for each row, N of them, from what the token is and not from where it is computed.

    key: one key for the run's seed and step; prompt_id, sample, position: int32[N]. Slot, batch and device play no
    part, so neither order nor sharding nor a restart changes a token.
    """

    def fold(prompt: jax.Array, number: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, prompt), number), place)

    return jax.vmap(fold)(prompt_id, sample, position)


def categorical(mass: jax.Array, uniforms: jax.Array, block: int = 256) -> jax.Array:
    """Draw an index from unnormalised masses f32[N, V] >= 0 by inverting the distribution function, int32[N].

    Two uniforms f32[N, 2] for each row: the first picks a block of the vocabulary, the second an index in it. Against
    one Gumbel number for every token this saves V random numbers a row, most of the cost of a draw on a CPU; two
    levels also keep the resolution of float32 for rare tokens.
    """
    N, V = mass.shape
    blocks = jnp.pad(mass, ((0, 0), (0, -V % block))).reshape(N, -1, block)

    def invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
        below = jnp.cumsum(weights, axis=-1)
        # Only an index with mass may be drawn, whatever the rounding of the sums.
        reached = (below > uniform[:, None] * below[:, -1:]) & (weights > 0)
        return jnp.where(jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), jnp.argmax(weights, axis=-1))

    place = invert(jnp.sum(blocks, axis=-1), uniforms[:, 0])
    within = jnp.take_along_axis(blocks, place[:, None, None], axis=1)[:, 0]
    return (place * block + invert(within, uniforms[:, 1])).astype(jnp.int32)


def draw(
    logits: jax.Array, keys: jax.Array, temperature: jax.Array, filters: Filters | None, greedy: bool = False
) -> Drawn:
    """Draw a token for each row of logits f32[N, V] with a key each.

    filters None samples the whole softmax(logits / temperature). greedy (static) takes the most probable token; its
    log-probability is then that of the untempered, unfiltered distribution.
    """
    scaled = logits if greedy else logits / temperature
    floor = jnp.full(logits.shape[0], -jnp.inf)
    if filters is not None and not greedy:
        kept = keep(scaled, filters)
        floor = support_floor(scaled, kept)
        scaled = jnp.where(kept, scaled, -jnp.inf)
    scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.exp(scaled)
    total = jnp.sum(mass, axis=-1)
    if greedy:
        token = jnp.argmax(scaled, axis=-1).astype(jnp.int32)
    else:
        token = categorical(mass, jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys))
    entropy = jnp.log(total) - jnp.sum(jnp.where(mass > 0, mass * scaled, 0.0), axis=-1) / total
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return Drawn(token, chosen - jnp.log(total), entropy, floor)
