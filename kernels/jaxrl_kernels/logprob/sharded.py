"""`fused_logprob` on one device, and over a vocabulary that is sharded into equal slices along a mesh axis.

Device i of S along the axis has tokens i V / S to (i + 1) V / S. Each makes one pass over its slice (two with a floor),
and collectives on [M] arrays combine four numbers for each row. With s_i the logsumexp of a slice's logits, H_i the
entropy within it and w_i = exp(s_i - s),

    s = logsumexp_i s_i,    logp = z[target] - s,    entropy = sum_i w_i (H_i - log w_i).

In the backward pass the gradient of the hidden states is summed over the axis; that of the unembedding stays sharded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.logprob.dispatch import LogprobOptions, slice_normaliser, slice_parts
from jaxrl_kernels.logprob.tile import Normaliser, SliceResult, Support


def by_whole(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    floor: jax.Array | None,
    options: LogprobOptions,
) -> tuple[jax.Array, jax.Array]:
    """logp and entropy, f32[M], of an unsharded vocabulary; temperature f32[M], the rest as in `fused_logprob`."""
    limit, support = options.vocab_size, None
    if floor is not None:
        support = Support(floor, slice_normaliser(hidden, unembedding, temperature, options, limit))
    parts = slice_parts(hidden, unembedding, targets, temperature, support, options, limit)
    return parts.target_logit - parts.m - parts.log_l, parts.entropy


def by_slices(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    floor: jax.Array | None,
    options: LogprobOptions,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """As `by_whole`, inside `jax.shard_map`, from this device's slice [V / S, D]; the same on all devices of the axis.

    All arrays but the unembedding are replicated over the axis, and targets are global token ids. With check_vma=False,
    take gradients outside of the `shard_map`: inside, JAX's transposition of collectives makes gradients of a loss that
    is replicated over the axis S times as large.
    """
    mine = unembedding.shape[0]
    vocabulary, offset = mine * jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name) * mine
    limit = None if options.vocab_size is None else options.vocab_size - offset
    vocabulary = options.vocab_size or vocabulary
    support = None
    if floor is not None:
        of_slice = slice_normaliser(hidden, unembedding, temperature, options, limit)
        support = Support(floor, _normaliser(of_slice, axis_name))
    known = (targets >= 0) & (targets < vocabulary)
    places = jnp.where(known, targets - offset, -1)
    parts = slice_parts(hidden, unembedding, places, temperature, support, options, limit)
    here = (places >= 0) & (places < mine)
    return _combined(parts, here, known, axis_name)


def _normaliser(of_slice: Normaliser, axis_name: str | tuple[str, ...]) -> Normaliser:
    """The normaliser of the whole vocabulary. Differentiable with respect to log_l."""
    m = jax.lax.pmax(jax.lax.stop_gradient(of_slice.m), axis_name)
    shift = jax.lax.stop_gradient(of_slice.m) - m
    return Normaliser(m, jnp.log(jax.lax.psum(jnp.exp(shift + of_slice.log_l), axis_name)))


def _combined(
    parts: SliceResult, here: jax.Array, known: jax.Array, axis_name: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """logp and entropy from the slices' results; here, known: bool[M], if the target is in this slice, or in any."""
    whole = _normaliser(Normaliser(parts.m, parts.log_l), axis_name)
    # Finite even if no token of the slice counts, so that products with its zero weight are zero.
    log_weight = jax.lax.stop_gradient(parts.m) - whole.m + parts.log_l - whole.log_l
    entropy = jax.lax.psum(jnp.exp(log_weight) * (parts.entropy - log_weight), axis_name)
    logit = jax.lax.psum(jnp.where(here, parts.target_logit, 0.0), axis_name)
    return jnp.where(known, logit, -jnp.inf) - whole.m - whole.log_l, entropy
