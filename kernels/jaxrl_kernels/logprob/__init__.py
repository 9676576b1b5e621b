"""Log-probability and entropy of tokens from hidden states, without the [M, V] logits."""

from __future__ import annotations

import jax

from jaxrl_kernels.logprob.dispatch import FAST, Way, check, rows_of, slice_normaliser, slice_parts, vary_together
from jaxrl_kernels.logprob.reference import reference_logprob
from jaxrl_kernels.logprob.sharded import sharded_logprob
from jaxrl_kernels.logprob.tile import Support

__all__ = ["IMPLEMENTATIONS", "fused_logprob", "sharded_logprob"]

IMPLEMENTATIONS = (*FAST, "reference")


def fused_logprob(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float = 0.0,
    support_floor: jax.Array | None = None,
    block_size: int | None = None,
    row_block: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of the distribution it is drawn from.

    The logits are `z = cap(hidden @ unembedding.T) / temperature` with `cap(x) = softcap * tanh(x / softcap)`. Without
    a floor, `logp = z[target] - logsumexp(z)` and `entropy = -sum_v p_v log p_v` with `p = softmax(z)`. With a floor,
    both are of `p` restricted to `{v: log p_v >= support_floor} + {target}` and renormalised: the distribution that
    top-k, top-p or min-p sampling draws from. Which tokens are kept is a constant in differentiation. Rounding can
    move a token across its own log-probability: put the floor a little below the least one to keep.

    Differentiable once, in reverse mode, with respect to `hidden` and `unembedding`; everything else has gradient
    zero. Peak memory is a few f32[M, block_size] arrays (with the kernels, one of [M, block_size] in the gradient only)
    and the gradients that are asked for. Going back makes the logits once more, for both gradients: 8 M D V operations
    in all, where the plain formula takes 6.

    Args:
      hidden: [M, D] final hidden states, float32 or bfloat16 (products are summed in float32); with
        `jax_enable_x64` also float64, which all results then are, and which no Pallas kernel takes.
      unembedding: [V, D], a row for each token, float32 or bfloat16; a tied embedding is passed as it is.
      targets: int32[M] in [0, V). Outside that range logp is -inf.
      temperature: > 0, a scalar or f32[M].
      softcap: 0 for none, else the bound of the logits before temperature (Gemma 2). Static.
      support_floor: f32[M], <= 0; -inf keeps everything. None costs nothing; an array costs a second forward pass.
      block_size: tokens of the vocabulary at a time; None for 2048 (blocked) or up to 8192 (pallas, which takes a
        multiple of its tiles, 128 tokens or more, and has no blocks but in the gradient). Static; changes speed and
        memory only.
      row_block: rows at a time of the kernels, a multiple of 32; None for up to 1024. Static.
      implementation: "pallas" (Mosaic kernels on TPU; elsewhere in interpret mode, for tests), "blocked" (plain JAX on
        any platform), "reference" (builds [M, V]; for tests), or None: pallas on TPU, blocked elsewhere and for
        float16. A Pallas kernel is not partitioned by the compiler: under a mesh call it inside `jax.shard_map`, or
        `sharded_logprob` there if the vocabulary is cut. The choice is made when the program is lowered, for one
        platform.

    Returns:
      logp f32[M] and entropy f32[M] (in nats).

    Raises:
      ValueError: shapes or dtypes do not fit, a number is out of range, or the implementation is not known.

    >>> import jax.numpy as jnp
    >>> hidden, unembedding = jnp.ones((1, 2)), jnp.zeros((4, 2))
    >>> logp, entropy = fused_logprob(hidden, unembedding, jnp.array([3]))
    >>> print(f"{logp[0]:.4f} {entropy[0]:.4f}")
    -1.3863 1.3863
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {implementation!r}: use None or one of {', '.join(IMPLEMENTATIONS)}")
    check(
        hidden,
        unembedding,
        targets,
        temperature,
        softcap,
        support_floor,
        {"block_size": block_size, "row_block": row_block},
    )
    targets, temperatures, floor = rows_of(hidden, targets, temperature, support_floor)
    if implementation == "reference":
        hidden, unembedding, targets, temperatures, floor = vary_together(
            hidden, unembedding, targets, temperatures, floor
        )
        return reference_logprob(hidden, unembedding, targets, temperatures, floor, float(softcap))
    way = Way(float(softcap), implementation, block_size, row_block)
    support = None
    if floor is not None:
        support = Support(floor, slice_normaliser(hidden, unembedding, temperatures, None, way))
    parts = slice_parts(hidden, unembedding, targets, temperatures, support, None, way)
    return parts.target_logit - parts.maximum - parts.log_total, parts.entropy
