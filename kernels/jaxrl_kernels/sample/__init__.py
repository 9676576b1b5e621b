"""Tokens drawn from hidden states or logits, with log-probability and entropy, in one pass over the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.sample.dispatch import FAST, check, local_sums
from jaxrl_kernels.sample.from_logits import sample_logits
from jaxrl_kernels.sample.noise import row_keys
from jaxrl_kernels.sample.reference import reference_sample
from jaxrl_kernels.sample.sharded import sharded_sample
from jaxrl_kernels.sample.tile import draw, finish

__all__ = ["IMPLEMENTATIONS", "fused_sample", "sample_logits", "sharded_sample"]

IMPLEMENTATIONS = (*FAST, "reference")


def fused_sample(
    hidden: jax.Array,
    unembedding: jax.Array,
    counters: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float = 0.0,
    allowed: jax.Array | None = None,
    implementation: str | None = None,
    block_size: int | None = None,
    row_block: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a token for each row in one pass over the vocabulary, without large arrays of logits or noise.

    With `cap(x) = softcap * tanh(x / softcap)`, the token is drawn from `p = softmax(z)` over the allowed tokens,
    `z = cap(hidden @ unembedding.T) / temperature`; `logp = log p_token` and `entropy = -sum_v p_v log p_v` are of that
    distribution. Rows of temperature 0 take the most probable allowed token; z is then not divided.

    The draw has two levels: `b* = argmax_b s_b + g1_b` over blocks b of 128 consecutive tokens, with `s_b` the
    logsumexp of their z, then `token = argmax_v z_v + g2_v` over the tokens of b* (the lowest of several in a tie). By
    the Gumbel-max theorem P(b) = exp(s_b) / sum_b' exp(s_b') and P(v | b) = exp(z_v - s_b), whose product is
    softmax(z)_v: the law is exact, for V / 128 + 128 random numbers a row instead of V.

    The noise g1 of a block and g2 of a token depends on the row's counters and the block's or token's index alone: see
    `noise.py` for the generator and for its resolution, 2^-31 in the tail. Batch, slot, tile sizes, sharding and
    platform do not change a bit of the random words. They may change the rounding of a matrix product, of a sum or of a
    logarithm, and with it a token whose score is that close to another's: scores closer than d are met in a fraction of
    about d of the draws, and d is some 1e-6 in float32 (more for logits beyond 100, as they are rounded themselves).

    Has no derivative: gradients are zero. Use `fused_logprob` on the token.

    Args:
      hidden: [N, D] final hidden states, float32 or bfloat16 (products are summed in float32).
      unembedding: [V, D], a row for each token, float32 or bfloat16; a tied embedding is passed as it is.
      counters: uint32[N, 4], (seed, prompt id, sample number, position) of each row. Rows with equal counters get
        equal noise; other integer dtypes are taken modulo 2^32.
      temperature: >= 0, a scalar or f32[N]; 0 is greedy.
      softcap: 0 for none, else the bound of the logits before temperature (Gemma 2). Static.
      allowed: bool[N, V], or int8[N, V] with 0 for forbidden, which spares the kernel a copy; None allows everything.
        A logit of -inf (or below -1e30) forbids its token too.
      implementation: "pallas" (one Mosaic kernel on TPU, nothing of size V in memory; elsewhere in interpret mode, for
        tests), "blocked" (plain JAX on any platform), "reference" (builds [N, V]; for tests), or None: pallas on TPU,
        blocked elsewhere. A Pallas kernel is not partitioned by the compiler: under a mesh call it inside
        `jax.shard_map`, or `sharded_sample` there if the vocabulary is cut. The choice is made when the program is
        lowered, for one platform.
      block_size: tokens of the vocabulary at a time, a multiple of 128. None for up to 1024 (pallas) or 4096 (blocked,
        which then also makes up to 2^22 logits, 16 MiB, by one product, and larger ones 4096 tokens at a time; with
        a number it makes no logits but those of a tile). Static; changes speed and memory only.
      row_block: rows at a time of the kernel, a multiple of 32; None for up to 256. Static.

    Returns:
      token int32[N], logp f32[N] and entropy f32[N] (in nats). Where nothing is allowed: -1, -inf and 0. Where a logit
      is NaN or inf: -1, NaN and NaN.

    Raises:
      ValueError: shapes or dtypes do not fit, a number is out of range, or the implementation is not known.

    >>> hidden, unembedding = jnp.ones((2, 1)), jnp.log(jnp.array([[1.0], [2.0], [1.0]]))
    >>> counters = jnp.array([[0, 7, 0, 0], [0, 7, 1, 0]], jnp.uint32)
    >>> token, logp, entropy = fused_sample(hidden, unembedding, counters, temperature=jnp.array([0.0, 1.0]))
    >>> print(token[0], f"{logp[0]:.4f} {entropy[0]:.4f}")
    1 -0.6931 1.0397
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {implementation!r}: use None or one of {', '.join(IMPLEMENTATIONS)}")
    check(
        hidden, unembedding, counters, temperature, softcap, allowed, {"block_size": block_size, "row_block": row_block}
    )
    keys = row_keys(counters.astype(jnp.uint32))
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), hidden.shape[:1])
    arrays = hidden, unembedding, keys, temperatures, allowed
    if implementation == "reference":
        return reference_sample(*jax.lax.stop_gradient(arrays), float(softcap))
    sums = local_sums(*arrays, float(softcap), implementation, block_size, row_block)
    return finish(draw(sums, keys, temperatures))
