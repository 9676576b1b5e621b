"""`fused_sample` on one device, and over a vocabulary that is sharded into equal slices along a mesh axis.

Device i of S along the axis has tokens i V / S to (i + 1) V / S. The noise is keyed on global indices of block and
token, so the token is the same as without sharding, and logp and entropy are up to rounding. Each device makes one pass
over its slice and draws in its best block; then collectives on [N] arrays combine six numbers for each row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.sample.dispatch import SampleOptions, local_sums
from jaxrl_kernels.sample.tile import SliceDraw, draw, finish, rescaled

NOWHERE = 2**30  # more than any token


def by_whole(
    hidden: jax.Array,
    unembedding: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    allowed: jax.Array | None,
    options: SampleOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """token, logp and entropy, [N], of an unsharded vocabulary; keys uint32[N, 2], temperature f32[N]."""
    sums = local_sums(hidden, unembedding, keys, temperature, allowed, options, limit=options.vocab_size)
    return finish(draw(sums, keys, temperature))


def by_slices(
    hidden: jax.Array,
    unembedding: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    allowed: jax.Array | None,
    options: SampleOptions,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `by_whole`, inside `jax.shard_map`, from this device's slice [V / S, D]; the same on all devices of the axis.

    V / S is a multiple of 128. allowed: this device's slice of the mask. All other arrays are replicated over the axis.
    """
    mine = unembedding.shape[0]
    offset = jax.lax.axis_index(axis_name) * mine
    limit = None if options.vocab_size is None else jnp.clip(options.vocab_size - offset, 0, mine)
    sums = local_sums(hidden, unembedding, keys, temperature, allowed, options, offset, limit)
    return finish(_combine(draw(sums, keys, temperature), axis_name))


def _combine(drawn: SliceDraw, axis_name: str | tuple[str, ...]) -> SliceDraw:
    """Combine the slices' draws into that of the whole vocabulary. The lowest block wins a tie, as within a tile."""
    score, m = jax.lax.pmax((drawn.score, drawn.m), axis_name)
    # Slices consist of whole blocks, so in a tie the lowest token is in the lowest block.
    token = jax.lax.pmin(jnp.where(drawn.score == score, drawn.token, NOWHERE), axis_name)
    # In a tie, or if no token is allowed, several devices have the highest score, but only one has the token.
    logit = jnp.where(drawn.token == token, drawn.logit, 0.0)
    logit, l, acc = jax.lax.psum((logit, *rescaled(drawn, m)), axis_name)
    return SliceDraw(score, token, logit, m, l, acc)
