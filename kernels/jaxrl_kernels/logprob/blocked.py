"""Forward and backward pass of `fused_logprob` over blocks of a slice of the vocabulary, in plain JAX.

No [M, V] array is allocated. `gradients` is shared by all implementations: each provides the derivative of a block's
logits, and XLA computes the two products with it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.half_products import by_rows, is_half, over_rows, put_slice
from jaxrl_kernels.logprob import tile
from jaxrl_kernels.logprob.tile import EXCLUDED, Cotangents, Inputs, LogitSums, SliceResult, counted, d_logits, merge
from jaxrl_kernels.partition import zeros

Array = jax.Array


def fold_blocks(size: int, block_size: int, start: Any, step: Callable[[Any, Any, int], Any]) -> Any:
    """Fold `step(carry, first, width)` over the blocks of `range(size)`, of which the last can be partial."""
    full, short = divmod(size, block_size)
    carry = start
    if full == 1:
        carry = step(carry, 0, block_size)
    elif full:
        firsts = jnp.arange(full, dtype=jnp.int32) * block_size
        carry = jax.lax.scan(lambda c, first: (step(c, first, block_size), None), carry, firsts)[0]
    return step(carry, full * block_size, short) if short else carry


def columns(arrays: Any) -> Any:
    """Arrays [M] of a pytree as [M, 1]."""
    return jax.tree.map(lambda x: x[:, None], arrays)


def beside_a_tile(inputs: Inputs) -> Inputs:
    """The inputs with arrays [M] as [M, 1]."""
    targets, temperature, support = columns((inputs.targets, inputs.temperature, inputs.support))
    return inputs._replace(targets=targets, temperature=temperature, support=support)


def _logits(inputs: Inputs, first: Any, width: int) -> tuple[Array, Array]:
    """Logits f32[M, B] of a block before the cap, and its tokens int32[1, B]."""
    block = jax.lax.dynamic_slice_in_dim(inputs.unembedding, first, width, axis=0)
    return by_rows(inputs.hidden, block), first + jnp.arange(width, dtype=jnp.int32)[None]


def _of_block(inputs: Inputs, softcap: float, first: Any, width: int) -> LogitSums:
    rows = beside_a_tile(inputs)
    logits, token = _logits(inputs, first, width)
    z = tile.capped_logits(logits, softcap) / rows.temperature
    count = counted(z, token, rows)
    z = z if count is None else jnp.where(count, z, EXCLUDED)
    m = jnp.max(z, axis=1, keepdims=True)
    l = jnp.sum(jnp.exp(z - m), axis=1, keepdims=True)
    # The barrier keeps the two sums in separate loops: XLA for CPUs (2026) takes ten times as long if it fuses them.
    again, l = jax.lax.optimization_barrier((m, l))
    shifted = z - again
    acc = jnp.sum(jnp.exp(shifted) * shifted, axis=1, keepdims=True)
    place = rows.targets - first
    target_logit = jnp.take_along_axis(z, jnp.clip(place, 0, width - 1), axis=1)
    return LogitSums(m, l, acc, jnp.where((place >= 0) & (place < width), target_logit, -jnp.inf))


def blocked_sums(inputs: Inputs, softcap: float, block_size: int) -> LogitSums:
    """Sums f32[M, 1] over the slice, in one pass."""

    def add(before: LogitSums, first: Any, width: int) -> LogitSums:
        return merge(before, _of_block(inputs, softcap, first, width))

    start = tile.no_sums((inputs.hidden.shape[0], 1), inputs.hidden)
    return fold_blocks(inputs.unembedding.shape[0], block_size, start, add)


def gradients(
    inputs: Inputs, block_size: int, dz_of_block: Callable[[Any, int], Array], dz_dtype: Any
) -> tuple[Array, Array]:
    """The gradients with respect to hidden and unembedding, with their shapes and dtypes.

    dz_of_block: (first, width) -> [M, width], the derivative with respect to the logits of tokens first, ...,
    first + width - 1 before the cap. It is rounded to dz_dtype for the two products, which accumulate in float32.
    """
    hidden, unembedding = inputs.hidden, inputs.unembedding
    sums = tile.accumulation_dtype(hidden, unembedding)

    def step(before: tuple[Array, Array], first: Any, width: int) -> tuple[Array, Array]:
        block = jax.lax.dynamic_slice_in_dim(unembedding, first, width, axis=0)
        dz = dz_of_block(first, width).astype(dz_dtype)
        d_hidden = jnp.einsum("mv,vd->md", dz, block, preferred_element_type=sums)
        d_block = over_rows(dz, hidden.astype(dz.dtype)).astype(unembedding.dtype)
        return before[0] + d_hidden, put_slice(before[1], d_block, first, axis=0)

    start = zeros(hidden.shape, sums, hidden), zeros(unembedding.shape, unembedding.dtype, hidden)
    d_hidden, d_unembedding = fold_blocks(unembedding.shape[0], block_size, start, step)
    return d_hidden.astype(hidden.dtype), d_unembedding


def blocked_gradients(
    inputs: Inputs, parts: SliceResult, cotangents: Cotangents, softcap: float, block_size: int
) -> tuple[Array, Array]:
    """The gradients with respect to hidden and unembedding; the logits of each block are recomputed."""
    rows = beside_a_tile(inputs)

    def dz_of_block(first: Any, width: int) -> Array:
        logits, token = _logits(inputs, first, width)
        return d_logits(logits, token, rows, columns(parts), columns(cotangents), softcap)

    # Beside a bfloat16 unembedding as in all gradients of its products, whatever the states.
    dtype = jnp.result_type(inputs.hidden, inputs.unembedding)
    dtype = inputs.unembedding.dtype if is_half(inputs.hidden, inputs.unembedding) else dtype
    return gradients(inputs, block_size, dz_of_block, dtype)
