"""Sums over one tile of the vocabulary, their merge over tiles, and the derivative of a tile's logits.

Everything refers to a slice of the vocabulary, possibly all of it: its tokens are numbered from 0, and a target outside
of it matches no token. The result for a slice, with z the logits after temperature, over the tokens that count, is

    s = logsumexp_v z_v,    q_v = exp(z_v - s),    H = -sum_v q_v log q_v,    t = z at the target,

which gives `logp = t - s` and `entropy = H` for a single slice; see `dispatch.py` for several. The derivatives are
`ds / dz_v = q_v`, `dH / dz_v = -q_v (log q_v + H)` and `dt / dz_v = 1[v = target]`.

The largest logit m and l = sum_v exp(z_v - m) are kept separately instead of as a logsumexp, because z - m - log l is
exact for the most probable token however large the logits are. m is not differentiated; log l has the derivative of s.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.partition import zeros

EXCLUDED = -1e30  # stands for the logit -inf outside the support; finite, so that 0 * EXCLUDED is 0 and not NaN


class HeadOptions(NamedTuple):
    """Static options of the implementations, of `fused_logprob` and of `fused_sample`."""

    softcap: float
    implementation: str | None  # "pallas", "xla" or None
    block_size: int | None
    row_block: int | None
    vocab_size: int | None = None  # without padding


def reference_logprob(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    support_floor: jax.Array | None,
    *,
    softcap: float,
    vocab_size: int | None,
) -> tuple[jax.Array, jax.Array]:
    """The formula, with all [M, V] logits; arguments and results as of `fused_logprob`, temperature f32[M]."""
    sums = jnp.result_type(jnp.float32, hidden, unembedding)
    z = jnp.einsum("md,vd->mv", hidden, unembedding, preferred_element_type=sums)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    real = jnp.arange(unembedding.shape[0]) < (vocab_size or unembedding.shape[0])
    z = jnp.where(real, z, EXCLUDED)
    logp = jax.nn.log_softmax(z / jax.lax.stop_gradient(temperature)[:, None])
    chosen = (jnp.arange(unembedding.shape[0]) == targets[:, None]) & real
    if support_floor is not None:
        support = (jax.lax.stop_gradient(logp) >= support_floor[:, None]) | chosen
        logp = jax.nn.log_softmax(jnp.where(support, logp, EXCLUDED))
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
    return jnp.max(logp, axis=1, where=chosen, initial=-jnp.inf), entropy


Array = jax.Array


class Normaliser(NamedTuple):
    """log q_v = z_v - m - log_l."""

    m: Array
    log_l: Array


class Support(NamedTuple):
    """The tokens that count: those with a log-probability of at least `floor` under `whole`, and the target."""

    floor: Array
    whole: Normaliser  # of the whole vocabulary


class Inputs(NamedTuple):
    """Inputs of both passes over a slice of V tokens. Per-row arrays are [M], or [M, 1] to broadcast with a tile."""

    hidden: Array  # f32 or bf16 [M, D]
    unembedding: Array  # f32 or bf16 [V, D]
    targets: Array  # int32, relative to the slice's first token; outside of [0, V): in another slice
    temperature: Array  # f32
    support: Support | None  # None: all tokens count
    limit: Array | None  # int32[], tokens from this one on are padding; None: no padding


class LogitSums(NamedTuple):
    """Running sums over the tokens seen so far, f32, over the same axis."""

    m: Array  # max_v z_v
    l: Array  # sum_v exp(z_v - m)
    acc: Array  # sum_v exp(z_v - m) (z_v - m), for the entropy
    target_logit: Array  # z at the target; -inf until its tile is processed


class SliceResult(NamedTuple):
    """The result for a slice, f32[M] each: m, s - m, H and t."""

    m: Array
    log_l: Array
    entropy: Array
    target_logit: Array


class Cotangents(NamedTuple):
    """Cotangents of a `SliceResult`, f32[M] or [M, 1]. That of m is dropped."""

    log_l: Array
    entropy: Array
    target_logit: Array


def accumulation_dtype(*arrays: Array) -> Any:
    """The accumulation dtype for arrays: float32, or float64 if one of them is float64."""
    return jnp.result_type(jnp.float32, *arrays)


def no_sums(shape: tuple[int, ...], like: Array) -> LogitSums:
    """The sums over zero tokens."""
    zero = zeros(shape, accumulation_dtype(like), like)
    return LogitSums(zero + EXCLUDED, zero, zero, zero - jnp.inf)


def capped_logits(logits: Array, softcap: float) -> Array:
    """The logits before temperature."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def counted(z: Array, token: Array, rows: Inputs) -> Array | None:
    """Which tokens of a tile count, bool, broadcasts to [M, T]; None if all do.

    z: f32[M, T]; token: int32[M, T] or [1, T], their numbers; rows: with arrays [M, 1].
    """
    true = None
    if rows.support is not None:
        logp = z - rows.support.whole.m - rows.support.whole.log_l
        true = (logp >= rows.support.floor) | (token == rows.targets)
    if rows.limit is not None:
        true = token < rows.limit if true is None else true & (token < rows.limit)
    return true


def rescaled(sums: Any, m: Array) -> tuple[Array, Array]:
    """`l` and `acc` of sums relative to another m, which is not smaller than theirs."""
    shift = sums.m - m
    return jnp.exp(shift) * sums.l, jnp.exp(shift) * (sums.acc + shift * sums.l)


def merge(a: LogitSums, b: LogitSums) -> LogitSums:
    """Sums over the tokens of both."""
    m = jnp.maximum(a.m, b.m)
    (l_a, acc_a), (l_b, acc_b) = rescaled(a, m), rescaled(b, m)
    target_logit = jnp.maximum(a.target_logit, b.target_logit)
    return LogitSums(m, l_a + l_b, acc_a + acc_b, target_logit)


def finish(sums: LogitSums) -> SliceResult:
    """The slice's result, f32[M], from sums f32[M, K] over K groups of its tokens."""
    m = jnp.max(sums.m, axis=1, keepdims=True)
    l, acc = (jnp.sum(x, axis=1) for x in rescaled(sums, m))
    log_l = jnp.log(l)
    return SliceResult(m[:, 0], log_l, log_l - acc / l, jnp.max(sums.target_logit, axis=1))


def d_logits(
    logits: Array, token: Array, rows: Inputs, parts: SliceResult, cotangents: Cotangents, softcap: float
) -> Array:
    """f32[M, T]: the derivative with respect to a tile's logits f32[M, T] before the cap.

    token: int32[M, T] or [1, T]; rows, parts, cotangents: with arrays [M, 1].
    """
    capped = capped_logits(logits, softcap)
    z = capped / rows.temperature
    count = counted(z, token, rows)
    log_q = z - parts.m - parts.log_l
    # The exp of an excluded token can be inf: drop it before it is multiplied.
    q = jnp.exp(log_q) if count is None else jnp.where(count, jnp.exp(log_q), 0.0)
    dz = q * (cotangents.log_l - cotangents.entropy * (log_q + parts.entropy))
    dz = (jnp.where(token == rows.targets, cotangents.target_logit, 0.0) + dz) / rows.temperature
    return dz * (1.0 - jnp.square(capped / softcap)) if softcap else dz
