"""`fused_sample` on one device, and over a vocabulary that is sharded into equal slices along a mesh axis; checks.

Device i of S along the axis has tokens i V / S to (i + 1) V / S. The noise is keyed on global indices of block and
token, so the token is the same as without sharding, and logp and entropy are up to rounding. Each device makes one pass
over its slice and draws in its best block; then collectives on [N] arrays combine six numbers for each row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import by_platform
from jaxrl_kernels.partition import vary_together
from jaxrl_kernels.sample.noise import BLOCK
from jaxrl_kernels.sample.pallas_kernel import pallas_sums
from jaxrl_kernels.sample.tile import DrawSums, Inputs, SliceDraw, blocked_sums, draw, finish, rescaled

BLOCK_SIZE = 4096  # of "xla"; see the docstring of `fused_sample`
AT_ONCE = 4 * 2**20  # logits, 16 MiB: "xla" computes up to this many in one product, unless block_size is given


class SampleOptions(NamedTuple):
    """Static options of the implementations."""

    softcap: float
    implementation: str | None  # "pallas", "xla" or None
    block_size: int | None
    row_block: int | None
    vocab_size: int | None  # without padding


def local_sums(inputs: Inputs, options: SampleOptions, offset: Any = 0, limit: Any = None) -> DrawSums:
    """Sums over the first `limit` tokens of a slice of the vocabulary, which starts at token `offset`."""
    # Sampling is not differentiated, and a Pallas kernel has no differentiation rule.
    hidden, unembedding, temperature = jax.lax.stop_gradient((inputs.hidden, inputs.unembedding, inputs.temperature))
    inputs = inputs._replace(hidden=hidden, unembedding=unembedding, temperature=temperature)
    operands = vary_together(inputs, jnp.int32(offset), None if limit is None else jnp.int32(limit))

    def blocked(inputs: Inputs, offset: Any, limit: Any) -> DrawSums:
        at_once = options.block_size is None and inputs.hidden.shape[0] * inputs.unembedding.shape[0] <= AT_ONCE
        return blocked_sums(inputs, options.softcap, options.block_size or BLOCK_SIZE, at_once, offset, limit)

    def pallas(inputs: Inputs, offset: Any, limit: Any, *, interpret: bool) -> DrawSums:
        return pallas_sums(inputs, options.softcap, options.block_size, options.row_block, offset, limit, interpret)

    return by_platform(blocked, pallas, options.implementation if hidden.shape[0] else "xla", *operands)


def check(
    hidden: jax.Array,
    unembedding: jax.Array,
    counters: jax.Array,
    temperature: float | jax.Array,
    softcap: float,
    allowed: jax.Array | None,
    sizes: dict[str, int | None],
) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    for name, array in (("hidden", hidden), ("unembedding", unembedding)):
        if array.ndim != 2 or array.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"{name} must be a float32 or bfloat16 matrix, found {array.dtype}{list(array.shape)}")
    if hidden.shape[1] != unembedding.shape[1]:
        raise ValueError(
            "hidden [N, D] and unembedding [V, D] must have the same D, "
            f"found {list(hidden.shape)} and {list(unembedding.shape)}"
        )
    rows, vocabulary = hidden.shape[0], unembedding.shape[0]
    if vocabulary == 0:
        raise ValueError("unembedding has no rows: the vocabulary is empty")
    check_rows(rows, vocabulary, counters, temperature, allowed)
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or above, found {softcap}")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, found {size}")
    limit, block_size = sizes["vocab_size"], sizes["block_size"]
    if limit is not None and limit > vocabulary:
        raise ValueError(f"vocab_size is {limit}, but the unembedding has {vocabulary} rows")
    if block_size is not None and block_size % BLOCK:
        raise ValueError(f"block_size must be a multiple of {BLOCK}, found {block_size}")


def check_rows(
    rows: int, vocabulary: int, counters: jax.Array, temperature: float | jax.Array, allowed: jax.Array | None
) -> None:
    """Raise a ValueError if an argument does not match N rows and V tokens."""
    if counters.shape != (rows, 4) or not jnp.issubdtype(counters.dtype, jnp.integer):
        raise ValueError(
            f"counters must be uint32[{rows}, 4] (seed, prompt id, sample number, position), "
            f"found {counters.dtype}{list(counters.shape)}"
        )
    if jnp.shape(temperature) not in ((), (rows,)):
        raise ValueError(f"temperature must be a scalar or f32[{rows}], found shape {list(jnp.shape(temperature))}")
    if isinstance(temperature, float | int) and not temperature >= 0:
        raise ValueError(f"temperature must be 0 (greedy) or above, found {temperature}")
    if allowed is not None and (allowed.shape != (rows, vocabulary) or allowed.dtype not in (jnp.bool_, jnp.int8)):
        raise ValueError(
            f"allowed must be bool or int8[{rows}, {vocabulary}], found {allowed.dtype}{list(allowed.shape)}"
        )


NOWHERE = 2**30  # more than any token


def by_whole(inputs: Inputs, options: SampleOptions) -> tuple[jax.Array, jax.Array, jax.Array]:
    """token, logp and entropy, [N], of an unsharded vocabulary."""
    sums = local_sums(inputs, options, limit=options.vocab_size)
    return finish(draw(sums, inputs.keys, inputs.temperature))


def by_slices(
    inputs: Inputs, options: SampleOptions, axis_name: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `by_whole`, inside `jax.shard_map`, from this device's slice [V / S, D]; the same on all devices of the axis.

    V / S is a multiple of 128. allowed: this device's slice of the mask. All other arrays are replicated over the axis.
    """
    mine = inputs.unembedding.shape[0]
    offset = jax.lax.axis_index(axis_name) * mine
    limit = None if options.vocab_size is None else jnp.clip(options.vocab_size - offset, 0, mine)
    sums = local_sums(inputs, options, offset, limit)
    return finish(_combine(draw(sums, inputs.keys, inputs.temperature), axis_name))


def _combine(drawn: SliceDraw, axis_name: str | tuple[str, ...]) -> SliceDraw:
    """Combine the slices' draws into that of the whole vocabulary. The lowest block wins a tie, as within a tile."""
    score, m = jax.lax.pmax((drawn.score, drawn.m), axis_name)
    # Slices consist of whole blocks, so in a tie the lowest token is in the lowest block.
    token = jax.lax.pmin(jnp.where(drawn.score == score, drawn.token, NOWHERE), axis_name)
    # In a tie, or if no token is allowed, several devices have the highest score, but only one has the token.
    logit = jnp.where(drawn.token == token, drawn.logit, 0.0)
    logit, l, acc = jax.lax.psum((logit, *rescaled(drawn, m)), axis_name)
    return SliceDraw(score, token, logit, m, l, acc)
