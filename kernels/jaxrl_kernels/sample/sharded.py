"""`fused_sample` where each device holds a slice of the vocabulary, for use inside `jax.shard_map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.sample.dispatch import FAST, check, local_sums
from jaxrl_kernels.sample.noise import BLOCK, row_keys
from jaxrl_kernels.sample.tile import Drawn, draw, finish, rescaled

NOWHERE = 2**30  # more than any token


def sharded_sample(
    hidden: jax.Array,
    unembedding: jax.Array,
    counters: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    temperature: float | jax.Array = 1.0,
    softcap: float = 0.0,
    allowed: jax.Array | None = None,
    vocab_size: int | None = None,
    implementation: str | None = None,
    block_size: int | None = None,
    row_block: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`fused_sample` over a vocabulary that is cut into equal slices along a mesh axis; must run in `jax.shard_map`.

    Device i of S along `axis_name` holds tokens i V / S to (i + 1) V / S. Noise is that of the global block and token,
    so the result is that of `fused_sample` on the whole vocabulary; logp and entropy up to rounding. Each device makes
    one pass over its slice and draws in its best block; then six numbers a row are combined by collectives on [N]
    arrays. No block of 128 tokens may be cut: pad the vocabulary to a multiple of 128 S and pass vocab_size.

    Args:
      hidden: [N, D], the same on all devices of the axis; rows may be sharded over other axes.
      unembedding: [V / S, D], this device's slice; V / S is a multiple of 128 where S > 1.
      counters: uint32[N, 4], as of `fused_sample`, the same on all devices of the axis.
      axis_name: mesh axis, or several, over which the vocabulary is cut.
      temperature: as of `fused_sample`.
      softcap: as of `fused_sample`. Static.
      allowed: bool or int8[N, V / S], this device's slice of the mask, or None.
      vocab_size: tokens from this one on are padding and never drawn; None if there are none. Static.
      implementation: "pallas", "blocked" or None, as of `fused_sample`.
      block_size, row_block: as of `fused_sample`.

    Returns:
      token int32[N], global; logp f32[N]; entropy f32[N]: the same on all devices of the axis.

    Raises:
      ValueError: shapes or dtypes do not fit, a slice is no multiple of 128 tokens, a number is out of range, or the
        implementation is not known.
    """
    if implementation not in (None, *FAST):
        raise ValueError(f"unknown implementation {implementation!r}: use None or one of {', '.join(FAST)}")
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, found {vocab_size}")
    check(
        hidden, unembedding, counters, temperature, softcap, allowed, {"block_size": block_size, "row_block": row_block}
    )
    mine = unembedding.shape[0]
    if mine % BLOCK and jax.lax.axis_size(axis_name) > 1:
        raise ValueError(
            f"slices of the vocabulary must be a multiple of {BLOCK} tokens, found {mine}: pad unembedding and "
            "allowed, and pass vocab_size, the number of tokens before the padding"
        )
    offset = jax.lax.axis_index(axis_name) * mine
    keys = row_keys(counters.astype(jnp.uint32))
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), hidden.shape[:1])
    sums = local_sums(
        hidden,
        unembedding,
        keys,
        temperatures,
        allowed,
        float(softcap),
        implementation,
        block_size,
        row_block,
        offset,
        None if vocab_size is None else jnp.clip(vocab_size - offset, 0, mine),
    )
    return finish(_combine(draw(sums, keys, temperatures), axis_name))


def _combine(drawn: Drawn, axis_name: str | tuple[str, ...]) -> Drawn:
    """What the whole vocabulary gives from what its slices do. The lowest block wins a tie, as within a tile."""
    score, maximum = jax.lax.pmax((drawn.score, drawn.maximum), axis_name)
    # Slices hold whole blocks, so of several the token of the lowest block is the lowest token.
    token = jax.lax.pmin(jnp.where(drawn.score == score, drawn.token, NOWHERE), axis_name)
    # Several devices hold the highest score in a tie or where nothing is allowed, but only one of them the token.
    logit = jnp.where(drawn.token == token, drawn.logit, 0.0)
    logit, total, weighted = jax.lax.psum((logit, *rescaled(drawn, maximum)), axis_name)
    return Drawn(score, token, logit, maximum, total, weighted)
