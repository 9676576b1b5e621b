"""`fused_logprob` by blocks of the vocabulary, forward and backward, in plain JAX for any platform.

No [M, V] array exists at any time. The first block may be short (V need not be a multiple of the block size) and is
worked out before the scan over the others: its results start the scan's carry, so there are no columns to pad or mask,
and the carry has the right varying axes inside `jax.shard_map`.

One pass keeps, per row, the largest logit m, log sum_v exp(z_v - m) and the mean of z_v - m under the softmax. They
are kept apart, never as log-sum-exp, because z - m - log_sum is exact for the likeliest token however large the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.logprob.reference import EXCLUDED

Array = jax.Array


class Inputs(NamedTuple):
    """What both passes read."""

    hidden: Array  # f32 or bf16 [M, D]
    unembedding: Array  # f32 or bf16 [V, D]
    targets: Array  # int32[M]
    temperature: Array  # f32[M]
    support_floor: Array | None  # f32[M]


class Sums(NamedTuple):
    """Running sums over the columns seen so far, f32[M] each."""

    maximum: Array  # m = max_v z_v
    total: Array  # sum_v exp(z_v - m)
    weighted: Array  # sum_v exp(z_v - m) (z_v - m)
    target_logit: Array  # z at the target; -inf until its block has come


class Normaliser(NamedTuple):
    """log q_v = z_v - maximum - log_total."""

    maximum: Array  # f32[M]
    log_total: Array  # f32[M]


class Residuals(NamedTuple):
    """What the backward pass needs: the inputs and four or six numbers a row."""

    inputs: Inputs
    whole: Normaliser | None  # of the whole vocabulary, which decides the support; None without a floor
    kept: Normaliser  # of the support
    entropy: Array  # f32[M]


def _fold_blocks(
    size: int, block_size: int, first: Callable[[Any, int], Any], step: Callable[[Any, Any, int], Any]
) -> Any:
    """Fold over the blocks of `range(size)`: `first(start, width)`, then `step(carry, start, width)` in a scan."""
    count = -(-size // block_size)
    width = size - (count - 1) * block_size
    carry = first(0, width)
    if count == 1:
        return carry
    starts = jnp.arange(width, size, block_size, dtype=jnp.int32)
    return jax.lax.scan(lambda c, start: (step(c, start, block_size), None), carry, starts)[0]


def _logits(inputs: Inputs, softcap: float, start: Any, width: int) -> tuple[Array, Array, Array]:
    """One block: its rows of the unembedding [B, D], the capped logits before temperature, f32[M, B], and z after."""
    block = jax.lax.dynamic_slice_in_dim(inputs.unembedding, start, width, axis=0)
    capped = jnp.einsum("md,vd->mv", inputs.hidden, block, preferred_element_type=jnp.float32)
    if softcap:
        capped = softcap * jnp.tanh(capped / softcap)
    return block, capped, capped / inputs.temperature[:, None]


def _chosen(inputs: Inputs, start: Any, width: int) -> Array:
    """bool[M, B], true at the target."""
    return jnp.arange(width, dtype=jnp.int32) == (inputs.targets - start)[:, None]


def _support(inputs: Inputs, whole: Normaliser, z: Array, chosen: Array) -> Array:
    """bool[M, B], true on tokens at or above the floor, and on the target."""
    assert inputs.support_floor is not None
    logp = z - whole.maximum[:, None] - whole.log_total[:, None]
    return (logp >= inputs.support_floor[:, None]) | chosen


def _sums(inputs: Inputs, softcap: float, block_size: int, whole: Normaliser | None) -> Sums:
    """One pass over the vocabulary; only over the support when `whole` says what it is."""

    def of_block(start: Any, width: int) -> Sums:
        _, _, z = _logits(inputs, softcap, start, width)
        chosen = _chosen(inputs, start, width)
        if whole is not None:
            z = jnp.where(_support(inputs, whole, z, chosen), z, EXCLUDED)
        maximum = jnp.max(z, axis=1)
        shifted = z - maximum[:, None]
        exponential = jnp.exp(shifted)
        return Sums(
            maximum,
            jnp.sum(exponential, axis=1),
            jnp.sum(exponential * shifted, axis=1),
            jnp.max(z, axis=1, where=chosen, initial=-jnp.inf),
        )

    def step(before: Sums, start: Any, width: int) -> Sums:
        block = of_block(start, width)
        maximum = jnp.maximum(before.maximum, block.maximum)

        def rescaled(sums: Sums) -> tuple[Array, Array]:
            shift = sums.maximum - maximum
            return jnp.exp(shift) * sums.total, jnp.exp(shift) * (sums.weighted + shift * sums.total)

        (total_a, weighted_a), (total_b, weighted_b) = rescaled(before), rescaled(block)
        target_logit = jnp.maximum(before.target_logit, block.target_logit)
        return Sums(maximum, total_a + total_b, weighted_a + weighted_b, target_logit)

    return _fold_blocks(inputs.unembedding.shape[0], block_size, of_block, step)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def blocked_logprob(
    hidden: Array,
    unembedding: Array,
    targets: Array,
    temperature: Array,
    support_floor: Array | None,
    softcap: float,
    block_size: int,
) -> tuple[Array, Array]:
    """Log-probability of the targets, and entropy, f32[M] each; arguments as of `fused_logprob`, temperature f32[M]."""
    return _forward(hidden, unembedding, targets, temperature, support_floor, softcap, block_size)[0]


def _forward(
    hidden: Array,
    unembedding: Array,
    targets: Array,
    temperature: Array,
    support_floor: Array | None,
    softcap: float,
    block_size: int,
) -> tuple[tuple[Array, Array], Residuals]:
    inputs = Inputs(hidden, unembedding, targets, temperature, support_floor)
    sums = _sums(inputs, softcap, block_size, None)
    whole = None
    if support_floor is not None:
        whole = Normaliser(sums.maximum, jnp.log(sums.total))
        sums = _sums(inputs, softcap, block_size, whole)
    kept = Normaliser(sums.maximum, jnp.log(sums.total))
    entropy = kept.log_total - sums.weighted / sums.total
    logp = sums.target_logit - kept.maximum - kept.log_total
    return (logp, entropy), Residuals(inputs, whole, kept, entropy)


def _backward(softcap: float, block_size: int, saved: Residuals, cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    """d logp / d z_v = 1[v = target] - q_v  and  d entropy / d z_v = -q_v (log q_v + entropy), on the support."""
    inputs, kept = saved.inputs, saved.kept
    logp_cotangent, entropy_cotangent = (cotangent[:, None] for cotangent in cotangents)
    matmul_dtype = jnp.result_type(inputs.hidden, inputs.unembedding)

    def of_block(start: Any, width: int) -> tuple[Array, Array]:
        block, capped, z = _logits(inputs, softcap, start, width)
        chosen = _chosen(inputs, start, width)
        logq = z - kept.maximum[:, None] - kept.log_total[:, None]
        q = jnp.exp(logq)
        if saved.whole is not None:
            # An excluded token can be so much likelier than the target that its exp is inf: drop it before a product.
            q = jnp.where(_support(inputs, saved.whole, z, chosen), q, 0.0)
        dz = jnp.where(chosen, logp_cotangent, 0.0) - q * (
            logp_cotangent + entropy_cotangent * (logq + saved.entropy[:, None])
        )
        dz = dz / inputs.temperature[:, None]
        if softcap:
            dz = dz * (1.0 - jnp.square(capped / softcap))
        dz = dz.astype(matmul_dtype)
        d_hidden = jnp.einsum("mv,vd->md", dz, block, preferred_element_type=jnp.float32)
        d_block = jnp.einsum("mv,md->vd", dz, inputs.hidden, preferred_element_type=jnp.float32)
        return d_hidden, d_block.astype(inputs.unembedding.dtype)

    def write(buffer: Array, d_block: Array, start: Any) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, d_block, start, axis=0)

    def first(start: Any, width: int) -> tuple[Array, Array]:
        d_hidden, d_block = of_block(start, width)
        return d_hidden, write(jnp.zeros_like(inputs.unembedding), d_block, start)

    def step(before: tuple[Array, Array], start: Any, width: int) -> tuple[Array, Array]:
        d_hidden, d_block = of_block(start, width)
        return before[0] + d_hidden, write(before[1], d_block, start)

    d_hidden, d_unembedding = _fold_blocks(inputs.unembedding.shape[0], block_size, first, step)
    return d_hidden.astype(inputs.hidden.dtype), d_unembedding, None, None, None


blocked_logprob.defvjp(_forward, _backward)
