"""Choice of the implementation for a slice of the vocabulary, and checks of arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import by_platform
from jaxrl_kernels.partition import vary_together
from jaxrl_kernels.sample.blocked import blocked_sums
from jaxrl_kernels.sample.noise import BLOCK
from jaxrl_kernels.sample.pallas_kernel import pallas_sums
from jaxrl_kernels.sample.tile import DrawSums

BLOCK_SIZE = 4096  # of "xla"; see the docstring of `fused_sample`
AT_ONCE = 4 * 2**20  # logits, 16 MiB: "xla" computes up to this many in one product, unless block_size is given


class SampleOptions(NamedTuple):
    """Static options of the implementations."""

    softcap: float
    implementation: str | None  # "pallas", "xla" or None
    block_size: int | None
    row_block: int | None
    vocab_size: int | None  # without padding


def local_sums(
    hidden: jax.Array,
    unembedding: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    allowed: jax.Array | None,
    options: SampleOptions,
    offset: Any = 0,
    limit: Any = None,
) -> DrawSums:
    """Sums over the first `limit` tokens of a slice of the vocabulary, which starts at token `offset`."""
    # Sampling is not differentiated, and a Pallas kernel has no differentiation rule.
    hidden, unembedding, temperature = jax.lax.stop_gradient((hidden, unembedding, temperature))
    offset, limit = jnp.int32(offset), None if limit is None else jnp.int32(limit)
    operands = vary_together(hidden, unembedding, keys, temperature, allowed, offset, limit)

    def blocked(
        hidden: Any, unembedding: Any, keys: Any, temperature: Any, allowed: Any, offset: Any, limit: Any
    ) -> DrawSums:
        arrays = hidden, unembedding, keys, temperature, allowed
        at_once = options.block_size is None and hidden.shape[0] * unembedding.shape[0] <= AT_ONCE
        return blocked_sums(*arrays, options.softcap, options.block_size or BLOCK_SIZE, at_once, offset, limit)

    def pallas(
        hidden: Any,
        unembedding: Any,
        keys: Any,
        temperature: Any,
        allowed: Any,
        offset: Any,
        limit: Any,
        *,
        interpret: bool,
    ) -> DrawSums:
        arrays = hidden, unembedding, keys, temperature, allowed
        return pallas_sums(*arrays, options.softcap, options.block_size, options.row_block, offset, limit, interpret)

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
