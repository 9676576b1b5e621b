"""Log-probability and entropy of tokens from hidden states, without the [M, V] logits."""

from __future__ import annotations

from functools import partial

import jax

from jaxrl_kernels.implementations import check_implementation
from jaxrl_kernels.logprob.dispatch import LogprobOptions, check, rows_of
from jaxrl_kernels.logprob.reference import reference_logprob
from jaxrl_kernels.logprob.sharded import by_slices, by_whole
from jaxrl_kernels.partition import AnyMesh, Axis, check_apart, dividing, mesh_of, vary_together

__all__ = ["fused_logprob"]


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
    mesh: AnyMesh | None = None,
    row_axis: Axis = "data",
    vocab_axis: Axis = "tensor",
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of the distribution it is drawn from.

    The logits are `z = cap(hidden @ unembedding.T) / temperature` with `cap(x) = softcap * tanh(x / softcap)`. Without
    a floor, `logp = z[target] - logsumexp(z)` and `entropy = -sum_v p_v log p_v` with `p = softmax(z)`. With a floor,
    both are of `p` restricted to `{v: log p_v >= support_floor} + {target}` and renormalised: the distribution that
    top-k, top-p or min-p sampling draws from. Which tokens are kept is a constant in differentiation. Rounding can
    move a token across its own log-probability: put the floor a little below the least one to keep.

    Differentiable once, in reverse mode, with respect to `hidden` and `unembedding`; everything else has gradient
    zero. Peak memory is a few f32[M, block_size] arrays (with the kernels, one of [M, block_size] in the gradient only)
    and the gradients that are asked for. The backward pass makes the logits once more, for both gradients: 8 M D V
    operations in all, where the plain formula takes 6.

    On a mesh each device works on its rows and its slice of the vocabulary: see `sharded`. No device gathers the
    unembedding where its slices are equal, and no logits travel.

    Args:
      hidden: [M, D] final hidden states, float32 or bfloat16 (products are summed in float32); with
        `jax_enable_x64` also float64, which all results then are, and which no Pallas kernel takes.
      unembedding: [V, D], a row for each token, float32 or bfloat16; a tied embedding is passed as it is.
      targets: int32[M] in [0, V). Outside that range logp is -inf.
      temperature: > 0, a scalar or f32[M].
      softcap: 0 for none, else the bound of the logits before temperature (Gemma 2). Static.
      support_floor: f32[M], <= 0; -inf keeps everything. None costs nothing; an array costs a second forward pass.
      block_size: tokens of the vocabulary at a time; None for 2048 (xla) or up to 8192 (pallas, which takes a
        multiple of its tiles, 128 tokens or more, and has no blocks but in the gradient). Static; changes speed and
        memory only.
      row_block: rows at a time of the kernels, a multiple of 32; None for up to 1024. Static.
      implementation: "pallas", "xla", "reference" (builds [M, V]) or None, as `implementations` says; in float16 and
        float64 always xla.
      mesh: the devices, where the types of the arrays do not name them (`partition.mesh_of`).
      row_axis, vocab_axis: mesh axes over which rows and vocabulary are cut, where the mesh has them and they divide M
        and V evenly.

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
    check_implementation(implementation)
    check_apart(row_axis, vocab_axis)
    sizes = {"block_size": block_size, "row_block": row_block}
    check(hidden, unembedding, targets, temperature, softcap, support_floor, sizes)
    targets, temperatures, floor = rows_of(hidden, targets, temperature, support_floor)
    if implementation == "reference":
        hidden, unembedding, targets, temperatures, floor = vary_together(
            hidden, unembedding, targets, temperatures, floor
        )
        return reference_logprob(hidden, unembedding, targets, temperatures, floor, float(softcap))
    options = LogprobOptions(float(softcap), implementation, block_size, row_block)
    arrays = hidden, unembedding, targets, temperatures, floor
    mesh = mesh_of(mesh, arrays)
    if mesh is None:
        return by_whole(*arrays, options)
    rows, cut = dividing(mesh, row_axis, hidden.shape[0]), dividing(mesh, vocab_axis, unembedding.shape[0])
    on_device = (
        partial(by_whole, options=options) if cut is None else partial(by_slices, options=options, axis_name=cut)
    )
    specs = jax.P(rows), jax.P(cut), jax.P(rows), jax.P(rows), jax.P(rows)
    # Interpret mode does not know of varying axes.
    track = cut is not None and implementation != "pallas"
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=jax.P(rows), check_vma=track)(*arrays)
