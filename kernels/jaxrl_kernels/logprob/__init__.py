"""Log-probability and entropy of tokens from hidden states, without the [M, V] logits."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import check_implementation
from jaxrl_kernels.logprob.dispatch import HeadOptions, by_slices, check
from jaxrl_kernels.logprob.tile import accumulation_dtype, reference_logprob
from jaxrl_kernels.partition import ROWS, AnyMesh, Axis, check_apart, dividing, mesh_of, vary_together

__all__ = ["fused_logprob"]


def fused_logprob(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float = 0.0,
    support_floor: jax.Array | None = None,
    vocab_size: int | None = None,
    block_size: int | None = None,
    row_block: int | None = None,
    implementation: str | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = ROWS,
    vocab_axis: Axis = "tensor",
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target, and entropy of its distribution.

    The logits are `z = cap(hidden @ unembedding.T) / temperature` with `cap(x) = softcap * tanh(x / softcap)`. Without
    a floor, `logp = z[target] - logsumexp(z)` and `entropy = -sum_v p_v log p_v` with `p = softmax(z)`. With a floor,
    both are of `p` restricted to `{v: log p_v >= support_floor} + {target}` and renormalised: the distribution that
    top-k, top-p or min-p sampling draws from. The set of kept tokens is not differentiated. Because of rounding, the
    floor should be slightly below the smallest log-probability to keep.

    Differentiable once, in reverse mode, with respect to `hidden` and `unembedding`; all other gradients are zero. Peak
    memory is a few f32[M, block_size] arrays (with the kernels one, in the backward pass only) plus the gradients. The
    backward pass recomputes the logits once for both gradients: 8 M D V operations in total, compared with 6 of the
    plain formula.

    On a mesh each device works on its rows and its slice of the vocabulary: see `dispatch`. If the slices are equal, no
    device gathers the unembedding, and logits are never communicated.

    Args:
      hidden: [M, D] final hidden states, float32 or bfloat16 (products accumulate in float32); with `jax_enable_x64`
        also float64, in which case the results are float64 and Pallas kernels are not supported.
      unembedding: [V, D], a row for each token, float32 or bfloat16; pass a tied embedding as it is.
      targets: int32[M] in [0, V), or below `vocab_size`. Outside that range logp is -inf.
      temperature: > 0, a scalar or f32[M].
      softcap: bound of the logits before temperature (Gemma 2); 0 for none. Static.
      support_floor: f32[M], <= 0; -inf keeps everything. None is free; an array costs a second forward pass.
      vocab_size: number of tokens, if the last rows of the unembedding are padding, which no token has. Static.
      block_size: tokens of the vocabulary per block; None for 2048 (xla) or up to 8192 (pallas, which rounds it to a
        multiple of its tiles and uses blocks in the backward pass only). Static; changes speed and memory only.
      row_block: rows per block of the kernels, a multiple of 32; None for up to 1024. Static.
      implementation: "pallas", "xla", "reference" (allocates [M, V]) or None, see `implementations`; float16 and
        float64 are always xla.
      mesh: the devices, if the types of the arrays do not contain them (`partition.mesh_of`).
      row_axis, vocab_axis: mesh axes over which rows and vocabulary are sharded, if the mesh has them and they divide M
        and V evenly.

    Returns:
      logp f32[M] and entropy f32[M] (in nats).

    Raises:
      ValueError: shapes or dtypes do not match, a number is out of range, or the implementation is unknown.

    >>> import jax.numpy as jnp
    >>> hidden, unembedding = jnp.ones((1, 2)), jnp.zeros((4, 2))
    >>> logp, entropy = fused_logprob(hidden, unembedding, jnp.array([3]))
    >>> print(f"{logp[0]:.4f} {entropy[0]:.4f}")
    -1.3863 1.3863
    """
    check_implementation(implementation)
    check_apart(row_axis, vocab_axis)
    sizes = {"block_size": block_size, "row_block": row_block, "vocab_size": vocab_size}
    check(hidden, unembedding, targets, temperature, softcap, support_floor, sizes)
    dtype = accumulation_dtype(hidden)
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, dtype), hidden.shape[:1])
    floor = None if support_floor is None else support_floor.astype(dtype)
    targets = targets.astype(jnp.int32)
    arrays = hidden, unembedding, targets, *jax.lax.stop_gradient((temperatures, floor))
    if implementation == "reference":
        return reference_logprob(*vary_together(*arrays), softcap=float(softcap), vocab_size=vocab_size)
    options = HeadOptions(float(softcap), implementation, block_size, row_block, vocab_size)
    mesh = mesh_of(mesh, arrays)
    if mesh is None:
        return by_slices(*arrays, options)
    rows, cut = dividing(mesh, row_axis, hidden.shape[0]), dividing(mesh, vocab_axis, unembedding.shape[0])
    on_device = partial(by_slices, options=options, axis_name=cut)
    specs = jax.P(rows), jax.P(cut), jax.P(rows), jax.P(rows), jax.P(rows)
    # Interpret mode does not track varying axes.
    track = cut is not None and implementation != "pallas"
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=jax.P(rows), check_vma=track)(*arrays)
