"""`fused_logprob` over a vocabulary that is cut along a mesh axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.logprob.dispatch import FAST, Way, check, rows_of, slice_normaliser, slice_parts
from jaxrl_kernels.logprob.tile import Normaliser, Parts, Support


def sharded_logprob(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    temperature: float | jax.Array = 1.0,
    softcap: float = 0.0,
    support_floor: jax.Array | None = None,
    vocab_size: int | None = None,
    block_size: int | None = None,
    row_block: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`fused_logprob` over a vocabulary that is cut into equal slices along a mesh axis; must run in `jax.shard_map`.

    Device i of S along `axis_name` holds tokens i V / S to (i + 1) V / S. Each makes one pass over its slice (two with
    a floor) and four numbers a row are combined by collectives on [M] arrays. With s_i the logsumexp of a slice's
    logits, H_i the entropy within it and w_i = exp(s_i - s),

        s = logsumexp_i s_i,    logp = z[target] - s,    entropy = sum_i w_i (H_i - log w_i).

    Going back, the gradient of hidden states is summed over the axis, and that of the unembedding stays cut. Where V
    is no multiple of S, pad the unembedding with zeros to V' rows that are, and pass vocab_size = V.

    Inside a `shard_map` with check_vma=False take gradients outside of it: JAX's rules for collectives are such that
    gradients taken inside, of a loss that all devices of the axis know, come out S times as large.

    Args:
      hidden: [M, D], the same on all devices of the axis; rows may be sharded over other axes.
      unembedding: [V / S, D], this device's slice.
      targets: int32[M] in [0, vocab_size), global, the same on all devices of the axis. Outside logp is -inf.
      axis_name: mesh axis, or several, over which the vocabulary is cut.
      temperature: as of `fused_logprob`.
      softcap: as of `fused_logprob`. Static.
      support_floor: as of `fused_logprob`: of log-probabilities under the whole vocabulary.
      vocab_size: tokens from this one on are padding of probability zero; None if there are none. Static.
      block_size, row_block: as of `fused_logprob`.
      implementation: "pallas", "blocked" or None, as of `fused_logprob`.

    Returns:
      logp f32[M] and entropy f32[M] (in nats): the same on all devices of the axis.

    Raises:
      ValueError: shapes or dtypes do not fit, the slices hold fewer than vocab_size tokens, a number is out of range,
        or the implementation is not known.
    """
    if implementation not in (None, *FAST):
        raise ValueError(f"unknown implementation {implementation!r}: use None or one of {', '.join(FAST)}")
    sizes = {"block_size": block_size, "row_block": row_block, "vocab_size": vocab_size}
    check(hidden, unembedding, targets, temperature, softcap, support_floor, sizes)
    mine, slices = unembedding.shape[0], jax.lax.axis_size(axis_name)
    vocabulary = mine * slices if vocab_size is None else vocab_size
    if vocabulary > mine * slices:
        raise ValueError(
            f"vocab_size is {vocabulary}, but {slices} slices of {mine} tokens hold {mine * slices}: pad the "
            f"unembedding with zeros to a multiple of {slices} rows, not less than vocab_size"
        )
    targets, temperatures, floor = rows_of(hidden, targets, temperature, support_floor)
    offset = jax.lax.axis_index(axis_name) * mine
    limit = None if vocab_size is None else jnp.clip(vocabulary - offset, 0, mine)
    way = Way(float(softcap), implementation, block_size, row_block)
    support = None
    if floor is not None:
        whole = slice_normaliser(hidden, unembedding, temperatures, limit, way)
        support = Support(floor, _normaliser(whole, axis_name))
    known = (targets >= 0) & (targets < vocabulary)
    places = jnp.where(known, targets - offset, -1)
    parts = slice_parts(hidden, unembedding, places, temperatures, support, limit, way)
    here = (places >= 0) & (places < mine)
    return _combined(parts, here, known, axis_name)


def _normaliser(of_slice: Normaliser, axis_name: str | tuple[str, ...]) -> Normaliser:
    """That of the whole vocabulary. Differentiable with respect to log_total."""
    maximum = jax.lax.pmax(jax.lax.stop_gradient(of_slice.maximum), axis_name)
    shift = jax.lax.stop_gradient(of_slice.maximum) - maximum
    return Normaliser(maximum, jnp.log(jax.lax.psum(jnp.exp(shift + of_slice.log_total), axis_name)))


def _combined(
    parts: Parts, here: jax.Array, known: jax.Array, axis_name: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """logp and entropy from what the slices give; here, known: bool[M], whether the target is in this one or in any."""
    whole = _normaliser(Normaliser(parts.maximum, parts.log_total), axis_name)
    # Finite even where nothing in the slice counts, so that its weight of zero makes zeros of products with it.
    log_weight = jax.lax.stop_gradient(parts.maximum) - whole.maximum + parts.log_total - whole.log_total
    entropy = jax.lax.psum(jnp.exp(log_weight) * (parts.entropy - log_weight), axis_name)
    logit = jax.lax.psum(jnp.where(here, parts.target_logit, 0.0), axis_name)
    return jnp.where(known, logit, -jnp.inf) - whole.maximum - whole.log_total, entropy
