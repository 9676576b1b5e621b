"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): a token at a time, and rows of tokens in chunks."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.delta_rule import DeltaInputs as OfChunks
from jaxrl_kernels.delta_rule import Shares, delta_rule

Array = jax.Array


class DeltaInputs(NamedTuple):
    """What tokens [...] bring to the rule, q, k and v in any dtype, g and beta in that of states; a token that changes
    nothing has g = 0 and beta = 0.
    """

    q: Array  # [..., H, k], scaled
    k: Array  # [..., H, k]
    v: Array  # [..., H, v]
    g: Array  # [..., H], at most 0
    beta: Array  # [..., H]


def one_step(x: DeltaInputs, state: Array) -> tuple[Array, Array]:
    """Outputs [N, H, v] and the states [N, H, k, v] after one token of each row."""
    q, k, v = (each.astype(state.dtype) for each in (x.q, x.k, x.v))
    state = state * jnp.exp(x.g)[..., None, None]
    change = (v - jnp.einsum("nhk,nhkv->nhv", k, state)) * x.beta[..., None]
    state = state + k[..., :, None] * change[..., None, :]
    return jnp.einsum("nhk,nhkv->nhv", q, state).astype(x.v.dtype), state


def chunked(x: DeltaInputs, entry: Array, starts: Array, shares: Shares | None = None) -> tuple[Array, Array]:
    """Outputs [R, n, C, H, v] of tokens in chunks [R, n, C, ...], and the states after each; see `delta_rule`."""
    q, k, v = (jnp.swapaxes(each, 2, 3) for each in (x.q, x.k, x.v))
    g, beta = (jnp.swapaxes(each, 2, 3)[:, :, :, None] for each in (x.g, x.beta))
    out, after = delta_rule(OfChunks(q, k, v, g, beta), entry, starts, shares)
    return jnp.swapaxes(out, 2, 3), after


def shares_of(segments: Array, dtype: Any) -> Shares:
    """What chunks [R, n, C] share that follow each other in a row and hold several segments, 0 for padding."""
    R, n, C = segments.shape
    flat = segments.reshape(R, -1)
    latest = jax.lax.cummax(jnp.where(flat > 0, jnp.arange(n * C), -1), axis=1)  # the last token that is in a segment
    of_latest = jnp.where(latest >= 0, jnp.take_along_axis(flat, jnp.maximum(latest, 0), axis=1), 0).reshape(R, n, C)
    last = of_latest[..., -1:]
    before = jnp.pad(last, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    marks = segments, segments == before, segments == last, last == before
    return Shares(*(mark.astype(dtype)[:, :, None, None] for mark in marks))


def in_rows(
    x: DeltaInputs, size: int, state: Array | None = None, segments: Array | None = None
) -> tuple[Array, Array]:
    """Outputs [N, L, H, v] of rows of tokens, and the states [N, H, k, v] after them. size: of a chunk.

    state: [N, H, k, v], before; None: zeros. segments: int32[N, L], contiguous but for tokens
    that change nothing (0): which segment each token is of. None: all tokens of a row are of one.
    """
    N, L = x.g.shape[:2]
    n = -(-L // size)
    cut = partial(_cut, count=n, size=size)
    entry = jnp.broadcast_to(jnp.arange(n) - 1, (N, n))
    H, dk, dv = x.k.shape[2], x.k.shape[3], x.v.shape[3]
    if state is None:
        starts = jnp.zeros((N, 0, H, dk, dv), x.g.dtype)
    else:
        starts, entry = state[:, None], entry.at[:, 0].set(n)
    out, after = chunked(
        jax.tree.map(cut, x), entry, starts, None if segments is None else shares_of(cut(segments), x.g.dtype)
    )
    return out.reshape(N, n * size, H, dv)[:, :L], after[:, -1]


def _cut(x: Array, count: int, size: int) -> Array:
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], count, size, *x.shape[2:])
