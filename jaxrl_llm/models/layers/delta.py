"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) in chunks.

A head's state S [k, v] goes from token to token. With key k_t of length 1, value v_t, decay a_t = exp(g_t), rate b_t,

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t k_t S_{t-1})^T,    o_t = q_t S_t.

In a chunk of C tokens that begins with S, with G_t the sum of g up to t, this is (section 3.3 and appendix A there)

    (I + A) [U, W] = [b v, b exp(G) k],  A_ts = b_t exp(G_t - G_s) k_t . k_s for s < t,
    o_t = exp(G_t) q_t S + sum_{s <= t} exp(G_t - G_s) (q_t . k_s) (U - W S)_s,
    S'  = exp(G_C) S + sum_s exp(G_C - G_s) k_s (U - W S)_s^T.

Chunks need each other's states alone. A chunk may begin with the state of any earlier one: paths that branch share the
chunks before (`paths`). Memory is linear in tokens: a state of each chunk is kept for the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class DeltaInputs(NamedTuple):
    """What tokens [...] bring to the rule, in float32; a token that changes nothing has g = 0 and beta = 0."""

    q: Array  # [..., H, k], scaled
    k: Array  # [..., H, k]
    v: Array  # [..., H, v]
    g: Array  # [..., H], at most 0
    beta: Array  # [..., H]


class Chunk(NamedTuple):
    """How a chunk changes a state S [k, v] of each head: decay * S + keys^T (new - read S)."""

    decay: Array  # [..., H]
    keys: Array  # [..., H, C, k]
    new: Array  # [..., H, C, v]
    read: Array  # [..., H, C, k]

    def __call__(self, state: Array) -> Array:
        """The state [..., H, k, v] after it."""
        found = self.new - jnp.einsum("...ck,...kv->...cv", self.read, state)
        return self.decay[..., None, None] * state + jnp.einsum("...ck,...cv->...kv", self.keys, found)


def one_step(x: DeltaInputs, state: Array) -> tuple[Array, Array]:
    """Outputs [N, H, v] and the states [N, H, k, v] after one token of each row."""
    state = state * jnp.exp(x.g)[..., None, None]
    change = (x.v - jnp.einsum("nhk,nhkv->nhv", x.k, state)) * x.beta[..., None]
    state = state + x.k[..., :, None] * change[..., None, :]
    return jnp.einsum("nhk,nhkv->nhv", x.q, state), state


def chunked(x: DeltaInputs, entry: Array, starts: Array, segments: Array | None = None) -> tuple[Array, Array]:
    """Outputs [R, n, C, H, v] of tokens in chunks, and the states [R, n, H, k, v] after each chunk.

    x: [R, n, C, ...], n chunks of each row. entry: int32[R, n], what each chunk begins with: the state after an earlier
    chunk of the row (its number), one of the row's `starts` [R, s, H, k, v] (n + its number), or zeros (-1).
    segments: int32[R, n, C], where a row's chunks follow each other and hold several paths, contiguous but for tokens
    that change nothing (0): which path each token is of. By default all tokens of a chunk are of one.
    """
    q, k, v = (jnp.moveaxis(each, -2, 2) for each in (x.q, x.k, x.v))  # [R, n, H, C, ...]
    g, beta = (jnp.moveaxis(each, -1, 2) for each in (x.g, x.beta))  # [R, n, H, C]
    C = q.shape[-2]
    total = jnp.cumsum(g, axis=-1)
    pairs = jnp.tril(jnp.ones((C, C), bool))
    from_entry: Any = 1.0  # of each token: whether what the chunk begins with is of its path
    to_end: Any = 1.0  # whether its path goes on after the chunk
    through: Any = 1.0  # whether what the chunk begins with does
    if segments is not None:
        pairs, from_entry, to_end, through = _of_segments(segments, pairs)
    between = jnp.exp(jnp.where(pairs, total[..., :, None] - total[..., None, :], -jnp.inf))
    scaled = beta[..., None] * k
    system = jnp.tril(jnp.einsum("...ck,...dk->...cd", scaled, k) * between, -1)
    grown = jnp.exp(total) * from_entry
    right = jnp.concatenate([beta[..., None] * v, scaled * grown[..., None]], axis=-1)
    new, read = jnp.split(inverse_of_one_plus(system) @ right, [v.shape[-1]], axis=-1)
    end = total[..., -1:]
    chunk = Chunk(jnp.exp(end[..., 0]) * through, k * (jnp.exp(end - total) * to_end)[..., None], new, read)
    states, after = propagate(chunk, starts, entry)
    found = new - jnp.einsum("...ck,...kv->...cv", read, states)
    out = jnp.einsum("...ck,...kv->...cv", q * grown[..., None], states)
    out = out + jnp.einsum("...cd,...dv->...cv", jnp.einsum("...ck,...dk->...cd", q, k) * between, found)
    return jnp.moveaxis(out, 2, 3), after


def inverse_of_one_plus(a: Array) -> Array:
    """The inverse of 1 + A for matrices A [..., C, C] that are 0 on and above the diagonal.

    Blocks along the diagonal are inverted, of 1, 2, 4 ... rows: that of [[P, 0], [Q, R]] is
    [[P', 0], [-R' Q P', R']] with those of P and R. As stable as forward substitution, in products alone.
    """
    C = a.shape[-1]
    place, size = jnp.arange(C), 1
    found = jnp.broadcast_to(jnp.eye(C, dtype=a.dtype), a.shape)
    while size < C:
        block = place // size
        below = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        found = found - found @ jnp.where(below, a, 0) @ found
        size *= 2
    return found


def _of_segments(segments: Array, pairs: Array) -> tuple[Array, Array, Array, Array]:
    """The masks of `chunked`, where the chunks [R, n, C] of a row hold several segments."""
    R, n, C = segments.shape
    flat = segments.reshape(R, -1)
    latest = jax.lax.cummax(jnp.where(flat > 0, jnp.arange(n * C), -1), axis=1)  # the last token that is in a segment
    of_latest = jnp.where(latest >= 0, jnp.take_along_axis(flat, jnp.maximum(latest, 0), axis=1), 0).reshape(R, n, C)
    last = of_latest[..., -1]
    before = jnp.pad(last, ((0, 0), (1, 0)))[:, :-1]
    same = segments[..., :, None] == segments[..., None, :]
    of_tokens = lambda mask: mask[:, :, None].astype(jnp.float32)  # noqa: E731
    return (
        (pairs & same)[:, :, None], of_tokens(segments == before[..., None]), of_tokens(segments == last[..., None]),
        (last == before)[:, :, None].astype(jnp.float32),
    )  # fmt: skip


@jax.custom_vjp
def propagate(chunk: Chunk, starts: Array, entry: Array) -> tuple[Array, Array]:
    """The states before and after each chunk, [R, n, H, k, v] each. For the arguments see `chunked`."""
    return _propagate(chunk, starts, entry)


def _places(entry: Array, starts: Array) -> Array:
    """Indices into the states after all chunks, `starts`, and zeros."""
    return jnp.where(entry < 0, entry.shape[1] + starts.shape[1], entry)


def _take(states: Array, place: Array) -> Array:
    return jnp.take_along_axis(states, place[:, None, None, None, None], axis=1)[:, 0]


def _propagate(chunk: Chunk, starts: Array, entry: Array) -> tuple[Array, Array]:
    R, n = entry.shape
    places, shape = _places(entry, starts), starts.shape[2:]
    zeros = jnp.zeros((R, n, *shape), starts.dtype)
    known = jnp.concatenate([zeros, starts, zeros[:, :1]], axis=1)

    def step(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        known, before = carry
        state = _take(known, places[:, number])
        after = jax.tree.map(lambda x: x[:, number], chunk)(state)
        return known.at[:, number].set(after), before.at[:, number].set(state)

    known, before = jax.lax.fori_loop(0, n, step, (known, zeros))
    return before, known[:, :n]


def _propagate_forward(chunk: Chunk, starts: Array, entry: Array) -> tuple[tuple[Array, Array], Any]:
    before, after = _propagate(chunk, starts, entry)
    return (before, after), (chunk, starts, entry, before)


def _propagate_backward(residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Any, Array, None]:
    chunk, starts, entry, before = residuals
    d_before, d_after = cotangents
    n, places = entry.shape[1], _places(entry, starts)
    known = jnp.concatenate([d_after, jnp.zeros_like(starts), jnp.zeros_like(d_after[:, :1])], axis=1)

    def step(back: Array, carry: tuple[Array, Chunk]) -> tuple[Array, Chunk]:
        known, d_chunk = carry
        number = n - 1 - back
        own = jax.tree.map(lambda x: x[:, number], chunk)
        d_own, d_state = jax.vjp(lambda c, s: c(s), own, before[:, number])[1](known[:, number])
        d_state = d_state + d_before[:, number]
        place = places[:, number]
        known = known.at[jnp.arange(len(place)), place].add(d_state)
        return known, jax.tree.map(lambda all_, x: all_.at[:, number].set(x), d_chunk, d_own)

    known, d_chunk = jax.lax.fori_loop(0, n, step, (known, jax.tree.map(jnp.zeros_like, chunk)))
    return d_chunk, known[:, n : n + starts.shape[1]], None


propagate.defvjp(_propagate_forward, _propagate_backward)


def in_rows(
    x: DeltaInputs, size: int, state: Array | None = None, segments: Array | None = None
) -> tuple[Array, Array]:
    """Outputs [N, L, H, v] of rows of tokens, and the states [N, H, k, v] after them. size: of a chunk.

    state: [N, H, k, v], before; None: zeros. segments: int32[N, L], see `chunked`.
    """
    N, L = x.g.shape[:2]
    n = -(-L // size)
    cut = partial(_cut, count=n, size=size)
    entry = jnp.broadcast_to(jnp.arange(n) - 1, (N, n))
    H, dk, dv = x.k.shape[2], x.k.shape[3], x.v.shape[3]
    if state is None:
        starts = jnp.zeros((N, 0, H, dk, dv), x.v.dtype)
    else:
        starts, entry = state[:, None], entry.at[:, 0].set(n)
    out, after = chunked(jax.tree.map(cut, x), entry, starts, None if segments is None else cut(segments))
    return out.reshape(N, n * size, H, dv)[:, :L], after[:, -1]


def _cut(x: Array, count: int, size: int) -> Array:
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], count, size, *x.shape[2:])
