"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): a token at a time, and rows of tokens in chunks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxrl_kernels.delta_rule import DeltaInputs, Shares, delta_rule

Array = jax.Array
CHUNK = 32  # tokens of a chunk


def one_step(x: DeltaInputs, state: Array) -> tuple[Array, Array]:
    """Outputs [N, H, v] and the states [N, H, k, v] after one token of each of N rows."""
    q, k, v = (each.astype(state.dtype) for each in (x.q, x.k, x.v))
    q, k = (jnp.repeat(each, v.shape[1] // each.shape[1], axis=1) for each in (q, k))
    decay = jnp.exp(x.g)[..., None]
    # Both read the state before, so that it is read once for them, and once to be changed.
    both = jnp.einsum("nhmk,nhkv->nhmv", jnp.stack([k, q], axis=2), state) * decay[..., None]
    of_keys, of_queries = both[:, :, 0], both[:, :, 1]
    change = (v - of_keys) * x.beta[..., None]
    out = of_queries + jnp.sum(q * k, axis=-1, keepdims=True) * change
    return out.astype(x.v.dtype), decay[..., None] * state + k[..., :, None] * change[..., None, :]


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
    cut = partial(in_chunks, count=n, size=size)
    entry = jnp.broadcast_to(jnp.arange(n) - 1, (N, n))
    (H, dv), dk = x.v.shape[2:], x.k.shape[3]
    if state is None:
        starts = jnp.zeros((N, 0, H, dk, dv), x.g.dtype)
    else:
        starts, entry = state[:, None], entry.at[:, 0].set(n)
    shares = None if segments is None else shares_of(cut(segments), x.g.dtype)
    out, last = delta_rule(jax.tree.map(cut, x), entry, starts, shares, branches=0)
    return out.reshape(N, n * size, H, dv)[:, :L], last


def in_chunks(x: Array, count: int, size: int) -> Array:
    """Tokens [N, L, ...] in chunks [N, count, size, ...], with zeros after the last."""
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], count, size, *x.shape[2:])
