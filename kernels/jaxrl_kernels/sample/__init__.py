"""Draw tokens from hidden states or logits, with log-probability and entropy, in one pass over the vocabulary."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import by_platform, check_implementation, found
from jaxrl_kernels.logprob.dispatch import check_head
from jaxrl_kernels.logprob.tile import HeadOptions
from jaxrl_kernels.partition import ROWS, AnyMesh, Axis, check_apart, dividing, mesh_of, vary_together
from jaxrl_kernels.sample import tile
from jaxrl_kernels.sample.noise import BLOCK, row_keys
from jaxrl_kernels.sample.pallas_kernel import pallas_sums

__all__ = ["fused_sample", "sample_logits"]


def fused_sample(
    hidden: jax.Array,
    unembedding: jax.Array,
    counters: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float = 0.0,
    allowed: jax.Array | None = None,
    vocab_size: int | None = None,
    implementation: str | None = None,
    block_size: int | None = None,
    row_block: int | None = None,
    mesh: AnyMesh | None = None,
    row_axis: Axis = ROWS,
    vocab_axis: Axis = "tensor",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a token for each row in one pass over the vocabulary, without [N, V] arrays of logits or noise.

    With `cap(x) = softcap * tanh(x / softcap)`, the token is drawn from `p = softmax(z)` over the allowed tokens,
    `z = cap(hidden @ unembedding.T) / temperature`; `logp = log p_token` and `entropy = -sum_v p_v log p_v` are of that
    distribution. Rows of temperature 0 take the most probable allowed token; z is then not divided.

    The draw has two levels: `b* = argmax_b s_b + g1_b` over blocks b of 128 consecutive tokens, with `s_b` the
    logsumexp of their z, then `token = argmax_v z_v + g2_v` over the tokens of b* (the lowest of several in a tie). By
    the Gumbel-max theorem P(b) = exp(s_b) / sum_b' exp(s_b') and P(v | b) = exp(z_v - s_b), whose product is
    softmax(z)_v: the law is exact, for V / 128 + 128 random numbers a row instead of V.

    The noise g1 of a block and g2 of a token is keyed on the row's counters and the block's or token's index alone: see
    `noise.py` for the generator and for its resolution, 2^-31 in the tail. The random words do not depend on batch,
    slot, tile sizes, sharding or platform. These can change the rounding of a matrix product, a sum or a logarithm, and
    thus the token if two scores are that close: a fraction of about d of the draws has scores closer than d, which is
    about 1e-6 in float32 (more for logits above 100, which are themselves rounded).

    On a mesh each device works on its rows and its slice of the vocabulary (`by_slices`). Blocks of 128 tokens cannot
    be split, so pad the unembedding to a multiple of 128 tokens per device and pass vocab_size; otherwise every device
    draws from the whole vocabulary.

    Gradients are zero. Use `fused_logprob` for the token's log-probability with a gradient.

    Args:
      hidden: [N, D] final hidden states, float32 or bfloat16 (products accumulate in float32).
      unembedding: [V, D], a row for each token, float32 or bfloat16; pass a tied embedding as it is.
      counters: uint32[N, 4], (seed, prompt id, sample number, position) of each row. Rows with equal counters get
        equal noise; other integer dtypes are taken modulo 2^32.
      temperature: >= 0, a scalar or f32[N]; 0 is greedy.
      softcap: bound of the logits before temperature (Gemma 2); 0 for none. Static.
      allowed: bool[N, V], or int8[N, V] with 0 for forbidden, which saves the kernel a copy; None allows all tokens. A
        logit of -inf (or below -1e30) forbids its token too.
      vocab_size: tokens from this one on are padding and never drawn; None: no padding. Static.
      implementation: "pallas" (no array of size V), "xla", "reference" (allocates [N, V]) or None, see
        `implementations`.
      block_size: tokens of the vocabulary per tile, a multiple of 128. None for up to 1024 (pallas) or 4096 (xla, which
        then computes up to 2^22 logits, 16 MiB, in one product, and more of them in tiles of 4096 tokens; with a
        number, it always computes one tile at a time). Static; changes speed and memory only.
      row_block: rows per block of the kernel, a multiple of 32; None for up to 256. Static.
      mesh: the devices, if the types of the arrays do not contain them (`partition.mesh_of`).
      row_axis, vocab_axis: mesh axes over which rows and vocabulary are sharded, if the mesh has them and they divide N
        and V / 128 evenly.

    Returns:
      token int32[N], logp f32[N] and entropy f32[N] (in nats). If no token is allowed: -1, -inf and 0. If a logit is
      NaN or inf: -1, NaN and NaN.

    Raises:
      ValueError: shapes or dtypes do not match, a number is out of range, or the implementation is unknown.

    >>> hidden, unembedding = jnp.ones((2, 1)), jnp.log(jnp.array([[1.0], [2.0], [1.0]]))
    >>> counters = jnp.array([[0, 7, 0, 0], [0, 7, 1, 0]], jnp.uint32)
    >>> token, logp, entropy = fused_sample(hidden, unembedding, counters, temperature=jnp.array([0.0, 1.0]))
    >>> print(token[0], f"{logp[0]:.4f} {entropy[0]:.4f}")
    1 -0.6931 1.0397
    """
    check_implementation(implementation)
    check_apart(row_axis, vocab_axis)
    sizes = {"block_size": block_size, "row_block": row_block, "vocab_size": vocab_size}
    check_head(hidden, unembedding, (jnp.float32, jnp.bfloat16), "N", softcap, sizes)
    check_rows(hidden.shape[0], unembedding.shape[0], counters, temperature, allowed)
    if block_size is not None and block_size % BLOCK:
        raise ValueError(f"block_size must be a multiple of {BLOCK}, found {block_size}")
    (N, _), V = hidden.shape, unembedding.shape[0]
    keys = row_keys(counters.astype(jnp.uint32))
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (N,))
    if implementation == "reference" and vocab_size is not None:
        unembedding = unembedding[:vocab_size]
        allowed = None if allowed is None else allowed[:, :vocab_size]
    inputs = tile.Inputs(hidden, unembedding, keys, temperatures, allowed)
    if implementation == "reference":
        return tile.reference_sample(jax.lax.stop_gradient(inputs), float(softcap))
    options = HeadOptions(float(softcap), implementation, block_size, row_block, vocab_size)
    mesh = mesh_of(mesh, inputs)
    if mesh is None:
        return by_slices(inputs, options)
    rows, cut = dividing(mesh, row_axis, N), None if V % BLOCK else dividing(mesh, vocab_axis, V // BLOCK)
    on_device = partial(by_slices, options=options, axis_name=cut)
    specs = tile.Inputs(jax.P(rows), jax.P(cut), jax.P(rows), jax.P(rows), jax.P(rows, cut))  # type: ignore[arg-type]
    # Interpret mode does not track varying axes.
    track = implementation != "pallas"
    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=jax.P(rows), check_vma=track)(inputs)


def sample_logits(
    logits: jax.Array, counters: jax.Array, *, temperature: float | jax.Array = 1.0, allowed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a token for each row of logits, the same that `fused_sample` draws from hidden states with these logits.

    With z = logits / temperature, the token is drawn from p = softmax(z) over the allowed tokens; rows of temperature 0
    take the most probable one (the lowest of several), and z is then not divided. `logp = log p_token` and
    `entropy = -sum_v p_v log p_v`. The noise is that of `fused_sample`.

    Plain JAX without a loop over the vocabulary, so the compiler can shard logits over rows and over V. If the slices
    of V are multiples of 128, no device gathers the logits. Gradients are zero.

    Args:
      logits: f32[N, V], after any softcap. -inf (or below -1e30) forbids a token.
      counters: uint32[N, 4], (seed, prompt id, sample number, position) of each row, as in `fused_sample`.
      temperature: >= 0, a scalar or f32[N]; 0 is greedy.
      allowed: bool[N, V], or int8[N, V] with 0 for forbidden; None allows everything.

    Returns:
      token int32[N], logp f32[N] and entropy f32[N] (in nats). If no token is allowed: -1, -inf and 0. If a logit is
      NaN or inf: -1, NaN and NaN.

    Raises:
      ValueError: shapes or dtypes do not match, or the temperature is negative.

    >>> logits = jnp.log(jnp.array([[1.0, 2.0, 1.0]]))
    >>> token, logp, entropy = sample_logits(logits, jnp.zeros((1, 4), jnp.uint32), temperature=0.0)
    >>> print(token[0], f"{logp[0]:.4f} {entropy[0]:.4f}")
    1 -0.6931 1.0397
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be a float32 matrix, {found(logits)}: use astype")
    if logits.shape[1] == 0:
        raise ValueError("logits have no columns: the vocabulary is empty")
    check_rows(logits.shape[0], logits.shape[1], counters, temperature, allowed)
    logits, temperature = jax.lax.stop_gradient((logits, jnp.asarray(temperature, jnp.float32)))
    temperatures = jnp.broadcast_to(temperature, logits.shape[:1])
    keys = row_keys(counters.astype(jnp.uint32))
    z = tile.adjusted(logits, temperatures[:, None], None if allowed is None else allowed != 0, 0.0)
    return tile.finish(tile.draw(tile.of_tile(z, keys, temperatures[:, None], 0), keys, temperatures))


BLOCK_SIZE = 4096  # of "xla"; see the docstring of `fused_sample`
AT_ONCE = 4 * 2**20  # logits, 16 MiB: "xla" computes up to this many in one product, unless block_size is given


def local_sums(inputs: tile.Inputs, options: HeadOptions, offset: Any = 0, limit: Any = None) -> tile.DrawSums:
    """Sums over the first `limit` tokens of a slice of the vocabulary, which starts at token `offset`."""
    # Sampling is not differentiated, and a Pallas kernel has no differentiation rule.
    hidden, unembedding, temperature = jax.lax.stop_gradient((inputs.hidden, inputs.unembedding, inputs.temperature))
    inputs = inputs._replace(hidden=hidden, unembedding=unembedding, temperature=temperature)
    operands = vary_together(inputs, jnp.int32(offset), None if limit is None else jnp.int32(limit))

    def blocked(inputs: tile.Inputs, offset: Any, limit: Any) -> tile.DrawSums:
        at_once = options.block_size is None and inputs.hidden.shape[0] * inputs.unembedding.shape[0] <= AT_ONCE
        return tile.blocked_sums(inputs, options.softcap, options.block_size or BLOCK_SIZE, at_once, offset, limit)

    def pallas(inputs: tile.Inputs, offset: Any, limit: Any, *, interpret: bool) -> tile.DrawSums:
        return pallas_sums(inputs, options, offset, limit, interpret)

    return by_platform(blocked, pallas, options.implementation if hidden.shape[0] else "xla", *operands)


def check_rows(
    rows: int, vocabulary: int, counters: jax.Array, temperature: float | jax.Array, allowed: jax.Array | None
) -> None:
    """Raise a ValueError if an argument does not match N rows and V tokens."""
    if counters.shape != (rows, 4) or not jnp.issubdtype(counters.dtype, jnp.integer):
        raise ValueError(
            f"counters must be uint32[{rows}, 4] (seed, prompt id, sample number, position), {found(counters)}"
        )
    if jnp.shape(temperature) not in ((), (rows,)):
        raise ValueError(f"temperature must be a scalar or f32[{rows}], found shape {list(jnp.shape(temperature))}")
    if isinstance(temperature, float | int) and not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or above, found {temperature}")
    if allowed is not None and (allowed.shape != (rows, vocabulary) or allowed.dtype not in (jnp.bool_, jnp.int8)):
        raise ValueError(f"allowed must be bool or int8[{rows}, {vocabulary}], {found(allowed)}")


NOWHERE = 2**30  # more than any token


def by_slices(
    inputs: tile.Inputs, options: HeadOptions, axis_name: str | tuple[str, ...] | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """token, logp and entropy, [N], of a vocabulary that is whole, or inside `jax.shard_map` sliced along a mesh axis.

    With an axis, this device has the slice [V / S, D] of the unembedding, V / S a multiple of 128, and that of the mask
    `allowed`. All other arrays are replicated over the axis, and the results are the same on all of its devices.
    """
    if axis_name is None:
        sums = local_sums(inputs, options, limit=options.vocab_size)
        return tile.finish(tile.draw(sums, inputs.keys, inputs.temperature))
    mine = inputs.unembedding.shape[0]
    offset = jax.lax.axis_index(axis_name) * mine
    limit = None if options.vocab_size is None else jnp.clip(options.vocab_size - offset, 0, mine)
    drawn = tile.draw(local_sums(inputs, options, offset, limit), inputs.keys, inputs.temperature)
    # Combine the slices' draws into that of the whole vocabulary. The lowest block wins a tie, as within a tile.
    score, m = jax.lax.pmax((drawn.score, drawn.m), axis_name)
    # Slices consist of whole blocks, so in a tie the lowest token is in the lowest block.
    token = jax.lax.pmin(jnp.where(drawn.score == score, drawn.token, NOWHERE), axis_name)
    # In a tie, or if no token is allowed, several devices have the highest score, but only one has the token.
    logit = jnp.where(drawn.token == token, drawn.logit, 0.0)
    logit, l, acc = jax.lax.psum((logit, *tile.rescaled(drawn, m)), axis_name)
    return tile.finish(tile.SliceDraw(score, token, logit, m, l, acc))
