"""What one tile of the vocabulary tells about each row, how tiles are put together, and the derivative of a tile.

Everything is about a slice of the vocabulary, which may be all of it: its tokens are numbered from 0, and a target
outside of it is no token. A slice gives, with z the logits after temperature, over the tokens that count

    s = logsumexp_v z_v,    q_v = exp(z_v - s),    H = -sum_v q_v log q_v,    t = z at the target,

from which `logp = t - s` and `entropy = H` follow where there is one slice, and `sharded.py` says how where there are
more. Their derivatives are `ds / dz_v = q_v`, `dH / dz_v = -q_v (log q_v + H)` and `dt / dz_v = 1[v = target]`.

The largest logit m and l = sum_v exp(z_v - m) are kept apart, never as log-sum-exp, because z - m - log l is exact for
the likeliest token however large the logits. In differentiation m is a constant, and log l has the derivative of s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.logprob.reference import EXCLUDED
from jaxrl_kernels.partition import zeros

Array = jax.Array


class Normaliser(NamedTuple):
    """log q_v = z_v - m - log_l."""

    m: Array
    log_l: Array


class Support(NamedTuple):
    """The tokens that count are those of log-probability `floor` or more under `whole`, and the target."""

    floor: Array
    whole: Normaliser  # of the whole vocabulary


class Inputs(NamedTuple):
    """What both passes over a slice of V tokens read. Arrays of rows are [M], or [M, 1] beside a tile."""

    hidden: Array  # f32 or bf16 [M, D]
    unembedding: Array  # f32 or bf16 [V, D]
    targets: Array  # int32, counted from the slice's first token; outside of [0, V) it is in another slice
    temperature: Array  # f32
    support: Support | None  # None: all tokens count
    limit: Array | None  # int32[]: tokens from this one on are past the end of the vocabulary; None: none are


class LogitSums(NamedTuple):
    """Running sums over the tokens seen so far, f32, over the same axis."""

    m: Array  # max_v z_v
    l: Array  # sum_v exp(z_v - m)
    acc: Array  # sum_v exp(z_v - m) (z_v - m), for the entropy
    target_logit: Array  # z at the target; -inf until its tile has come


class SliceResult(NamedTuple):
    """What a slice gives, f32[M] each: m, s - m, H and t."""

    m: Array
    log_l: Array
    entropy: Array
    target_logit: Array


class Cotangents(NamedTuple):
    """Of a slice's `SliceResult`, f32[M], or [M, 1] beside a tile. That of m is dropped."""

    log_l: Array
    entropy: Array
    target_logit: Array


def accumulation_dtype(*arrays: Array) -> Any:
    """The dtype of sums over arrays: float32, or float64 where one of them is."""
    return jnp.result_type(jnp.float32, *arrays)


def no_sums(shape: tuple[int, ...], like: Array) -> LogitSums:
    """The sums over no token."""
    zero = zeros(shape, accumulation_dtype(like), like)
    return LogitSums(zero + EXCLUDED, zero, zero, zero - jnp.inf)


def products(left: Array, right: Array) -> Array:
    """f32[A, B]: the rows of left [A, D] times those of right [B, D], summed in float32."""
    dtype = jnp.result_type(left, right)
    contract_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        left.astype(dtype), right.astype(dtype), contract_last, preferred_element_type=accumulation_dtype(left, right)
    )


def capped_logits(logits: Array, softcap: float) -> Array:
    """The logits before temperature."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def counted(z: Array, token: Array, rows: Inputs) -> Array | None:
    """bool[M, T] (or what broadcasts), true on the tokens of a tile that count; None if all do.

    z: f32[M, T]; token: int32[M, T] or [1, T], the number of each; `rows` holds arrays [M, 1].
    """
    true = None
    if rows.support is not None:
        logp = z - rows.support.whole.m - rows.support.whole.log_l
        true = (logp >= rows.support.floor) | (token == rows.targets)
    if rows.limit is not None:
        true = token < rows.limit if true is None else true & (token < rows.limit)
    return true


def rescaled(sums: LogitSums, m: Array) -> tuple[Array, Array]:
    """`l` and `acc` for another m, which is not smaller."""
    shift = sums.m - m
    return jnp.exp(shift) * sums.l, jnp.exp(shift) * (sums.acc + shift * sums.l)


def merge(a: LogitSums, b: LogitSums) -> LogitSums:
    """Sums over the tokens of both."""
    m = jnp.maximum(a.m, b.m)
    (l_a, acc_a), (l_b, acc_b) = rescaled(a, m), rescaled(b, m)
    target_logit = jnp.maximum(a.target_logit, b.target_logit)
    return LogitSums(m, l_a + l_b, acc_a + acc_b, target_logit)


def finish(sums: LogitSums) -> SliceResult:
    """The parts, f32[M], from the sums, f32[M, K], of the K groups that a slice's tokens were put in."""
    m = jnp.max(sums.m, axis=1, keepdims=True)
    l, acc = (jnp.sum(x, axis=1) for x in rescaled(sums, m))
    log_l = jnp.log(l)
    return SliceResult(m[:, 0], log_l, log_l - acc / l, jnp.max(sums.target_logit, axis=1))


def d_logits(
    logits: Array, token: Array, rows: Inputs, parts: SliceResult, cotangents: Cotangents, softcap: float
) -> Array:
    """f32[M, T]: the derivative with respect to a tile's logits f32[M, T] before the cap.

    token: int32[M, T] or [1, T]; `rows`, `parts` and `cotangents` hold arrays [M, 1].
    """
    capped = capped_logits(logits, softcap)
    z = capped / rows.temperature
    count = counted(z, token, rows)
    log_q = z - parts.m - parts.log_l
    # An excluded token can be so much likelier than those that count that its exp is inf: drop it before a product.
    q = jnp.exp(log_q) if count is None else jnp.where(count, jnp.exp(log_q), 0.0)
    dz = q * (cotangents.log_l - cotangents.entropy * (log_q + parts.entropy))
    dz = (jnp.where(token == rows.targets, cotangents.target_logit, 0.0) + dz) / rows.temperature
    return dz * (1.0 - jnp.square(capped / softcap)) if softcap else dz
