"""Attention among packed tokens as a formula, and in blocks of queries for any platform; sizes of the kernels."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxrl_kernels.packed_attention.blocks import PackedTokens, block_sizes

Array = jax.Array

MASKED = -1e30  # the log-sum-exp of a query that attends to nothing
BLOCK_LOGITS = 2**26  # logits of a block of queries, at most


class Numbers(NamedTuple):
    """Static numbers of an attention."""

    query_scale: float
    softcap: float


class Sizes(NamedTuple):
    """Static sizes and options of the kernels."""

    N: int
    K: int  # key-value heads
    R: int  # query heads for each
    h: int
    L: int  # queries, a multiple of 128
    S: int  # keys, a multiple of 128
    dtype: Any
    numbers: Numbers
    attended: int  # pairs of a query and a key that attend, for the cost estimate
    interpret: bool

    @property
    def size(self) -> int:
        """Queries of a block, on TPUs."""
        return block_sizes(self.L, self.S)[0]

    @property
    def width(self) -> int:
        """Keys of a block, on TPUs."""
        return block_sizes(self.L, self.S)[1]

    @property
    def pairs(self) -> int:
        """How many pairs of blocks the lists have room for, on TPUs."""
        return self.L // self.size * (self.S // self.width)

    @property
    def units(self) -> int:
        """Head size on GPUs, a power of two; products need 16 at least."""
        return max(16, pl.next_power_of_2(self.h))

    @property
    def accumulation(self) -> jnp.dtype:
        """Of logits and sums."""
        return accumulation_dtype(self.dtype)


def sizes_of(q: Array, k: Array, numbers: Numbers, attended: int | None, interpret: bool) -> Sizes:
    """The sizes for queries [N, L, H, h] and keys [N, S, K, h]."""
    (N, L, H, h), (S, K) = q.shape, k.shape[1:3]
    attended = L * S // 2 if attended is None else attended
    return Sizes(N, K, H // K, h, L, S, q.dtype, numbers, attended, interpret)


def accumulation_dtype(dtype: Any) -> jnp.dtype:
    """float32, or float64 of float64."""
    return jnp.promote_types(dtype, jnp.float32)


def visible(queries: PackedTokens, keys: PackedTokens, window: Array | int) -> Array:
    """bool[N, L, S]: to which keys each query attends."""
    number = queries.enter[:, :, None]
    sees = (keys.enter[:, None] <= number) & (number < keys.leave[:, None])
    return sees & ((queries.position[:, :, None] - keys.position[:, None] < window) | (jnp.asarray(window) == 0))


def reference(
    q: Array, k: Array, v: Array, queries: PackedTokens, keys: PackedTokens, window: Array, numbers: Numbers
) -> tuple[Array, Array]:
    """Results [N, L, H, h] and log-sum-exps [N, H, L], with all logits at once. k, v: [N, S, K, h]."""
    (N, L, H, h), K = q.shape, k.shape[2]
    dtype = accumulation_dtype(q.dtype)
    logits = jnp.einsum("nlkrh,nskh->nkrls", q.reshape(N, L, K, H // K, h), k, preferred_element_type=dtype)
    logits, softcap = logits * numbers.query_scale, numbers.softcap
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    sees = visible(queries, keys, window)[:, None, None]
    m = jnp.max(jnp.where(sees, logits, MASKED), axis=-1, keepdims=True, initial=MASKED)
    weights = jnp.where(sees, jnp.exp(jnp.minimum(logits - m, 0)), 0)
    l = jnp.sum(weights, axis=-1, keepdims=True)
    some = l > 0
    weights = (weights / jnp.where(some, l, 1)).astype(v.dtype)
    out = jnp.einsum("nkrls,nskh->nlkrh", weights, v, preferred_element_type=dtype).reshape(q.shape)
    lse = jnp.where(some, m + jnp.log(jnp.where(some, l, 1)), MASKED)
    return out.astype(q.dtype), lse.reshape(N, H, L)


def blocked(
    q: Array, k: Array, v: Array, queries: PackedTokens, keys: PackedTokens, window: Array, numbers: Numbers
) -> tuple[Array, Array]:
    """As `reference`, a block of queries at a time, whose logits the backward pass computes again."""
    N, L, H, _ = q.shape
    size = max(128, BLOCK_LOGITS // max(N * H * k.shape[1], 1) // 128 * 128)
    if size >= L:
        return reference(q, k, v, queries, keys, window, numbers)
    count = -(-L // size)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - L)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(N, count, size, *x.shape[2:]).swapaxes(0, 1)

    @partial(jax.checkpoint, prevent_cse=False)
    def one(block: tuple[Array, PackedTokens]) -> tuple[Array, Array]:
        return reference(block[0], k, v, block[1], keys, window, numbers)

    out, lse = jax.lax.map(one, (cut(q), jax.tree.map(cut, queries)))
    out = out.swapaxes(0, 1).reshape(N, -1, *q.shape[2:])[:, :L]
    return out, jnp.moveaxis(lse, 0, 2).reshape(N, H, -1)[..., :L]
