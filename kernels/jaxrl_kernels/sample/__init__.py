"""Tokens drawn from hidden states, with log-probability and entropy, without the [N, V] logits or noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.sample.dispatch import FAST, check, local_sums
from jaxrl_kernels.sample.noise import row_keys
from jaxrl_kernels.sample.reference import reference_sample
from jaxrl_kernels.sample.sharded import sharded_sample
from jaxrl_kernels.sample.tile import finish

__all__ = ["IMPLEMENTATIONS", "fused_sample", "sharded_sample"]

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
    """Draw a token for each row in one pass over the vocabulary; nothing of size V is written to memory.

    With `cap(x) = softcap * tanh(x / softcap)`, the token is drawn from `p = softmax(z)` over the allowed tokens,
    `z = cap(hidden @ unembedding.T) / temperature`; `logp = log p_token` and `entropy = -sum_v p_v log p_v` are of that
    distribution. Rows of temperature 0 take the most probable allowed token; z is then not divided.

    The draw is `argmax_v z_v + g_v` (lowest v in a tie) with Gumbel noise g that depends on the row's counters and v
    alone: see `noise.py` for the generator and for its resolution, 2^-31 in the tail. Batch, slot, tile sizes, sharding
    and platform do not change a bit of the random words. They may change the rounding of a matrix product or of a
    logarithm, and with it a token whose score is that close to another's: scores closer than d are met in a fraction of
    about d of the draws, and d is some 1e-6 in float32.

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
      implementation: "pallas" (one Mosaic kernel on TPU; elsewhere in interpret mode, for tests), "blocked" (plain JAX
        on any platform), "reference" (builds [N, V]; for tests), or None: pallas on TPU, blocked elsewhere. A Pallas
        kernel is not partitioned by the compiler: under a mesh call it inside `jax.shard_map`, or `sharded_sample`
        there if the vocabulary is cut. The choice is made when the program is lowered, for one platform.
      block_size: columns of the vocabulary at a time, None for 4096 (blocked) or up to 1024 (pallas, where it must
        be a multiple of 128). A multiple of 256 halves the work of the noise. Static; changes speed and memory only.
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
    return finish(local_sums(*arrays, float(softcap), implementation, block_size, row_block))
