"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) in chunks.

A head's state S [k, v] goes from token to token. With key k_t of length 1, value v_t, decay a_t = exp(g_t), rate b_t,

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t k_t S_{t-1})^T,    o_t = q_t S_t.

In a chunk of C tokens that begins with S, with G_t the sum of g up to t, this is (section 3.3 and appendix A there)

    (I + A) [U, W] = [b v, b exp(G) k],  A_ts = b_t exp(G_t - G_s) k_t . k_s for s < t,
    o_t = exp(G_t) q_t S + sum_{s <= t} exp(G_t - G_s) (q_t . k_s) (U - W S)_s,
    S'  = exp(G_C) S + sum_s exp(G_C - G_s) k_s (U - W S)_s^T.

Chunks need each other's states alone. A chunk may begin with the state of any earlier one: paths that branch share the
chunks before (`paths`). Memory is linear in tokens: the backward pass keeps the state after each chunk and computes all
else of a chunk again (`chunk_step`), so that what is between stays in the processor's cache.
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


class Masks(NamedTuple):
    """Of chunks that hold tokens of several paths, bool: which tokens of a chunk are of one, and which share states."""

    same: Array  # [..., C, C]
    from_entry: Array  # [..., C], whether what the chunk begins with is of the token's path
    to_end: Array  # [..., C], whether the token's path goes on after the chunk
    through: Array  # [...], whether the path that the chunk begins with does


def one_step(x: DeltaInputs, state: Array) -> tuple[Array, Array]:
    """Outputs [N, H, v] and the states [N, H, k, v] after one token of each row."""
    state = state * jnp.exp(x.g)[..., None, None]
    change = (x.v - jnp.einsum("nhk,nhkv->nhv", x.k, state)) * x.beta[..., None]
    state = state + x.k[..., :, None] * change[..., None, :]
    return jnp.einsum("nhk,nhkv->nhv", x.q, state), state


def chunk_step(x: DeltaInputs, state: Array, masks: Masks | None = None) -> tuple[Array, Array]:
    """Outputs [..., C, H, v] of the C tokens of a chunk [..., C, H, ...], and the states [..., H, k, v] after them."""
    q, k, v = (jnp.swapaxes(each, -2, -3) for each in (x.q, x.k, x.v))  # [..., H, C, ...]
    g, beta = (jnp.swapaxes(each, -1, -2) for each in (x.g, x.beta))  # [..., H, C]
    C = q.shape[-2]
    total, pairs = jnp.cumsum(g, axis=-1), jnp.tril(jnp.ones((C, C), bool))
    grown, left, decay = jnp.exp(total), jnp.exp(total[..., -1:] - total), jnp.exp(total[..., -1])
    if masks is not None:
        pairs, grown = pairs & masks.same[..., None, :, :], grown * masks.from_entry[..., None, :]
        left, decay = left * masks.to_end[..., None, :], decay * masks.through[..., None]
    between = jnp.exp(jnp.where(pairs, total[..., :, None] - total[..., None, :], -jnp.inf))
    scaled = beta[..., None] * k
    system = jnp.tril(jnp.einsum("...ck,...dk->...cd", scaled, k) * between, -1)
    change = solved(system, beta[..., None] * v - (scaled * grown[..., None]) @ state)
    weights = jnp.einsum("...ck,...dk->...cd", q, k) * between
    out = (q * grown[..., None]) @ state + weights @ change
    after = decay[..., None, None] * state + jnp.einsum("...ck,...cv->...kv", k * left[..., None], change)
    return jnp.swapaxes(out, -2, -3), after


@jax.custom_vjp
def solved(a: Array, right: Array) -> Array:
    """X [..., C, m] with (1 + A) X = right, for matrices A [..., C, C] that are 0 on and above the diagonal."""
    return inverse_of_one_plus(a) @ right


def _solved_forward(a: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = inverse_of_one_plus(a)
    x = inverse @ right
    return x, (inverse, x)


def _solved_backward(residuals: tuple[Array, Array], d_x: Array) -> tuple[Array, Array]:
    inverse, x = residuals
    d_right = jnp.einsum("...cd,...cm->...dm", inverse, d_x)
    return -jnp.einsum("...cm,...dm->...cd", d_right, x), d_right


solved.defvjp(_solved_forward, _solved_backward)


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


@jax.custom_vjp
def chunked(x: DeltaInputs, entry: Array, starts: Array, masks: Masks | None = None) -> tuple[Array, Array]:
    """Outputs [R, n, C, H, v] of tokens in chunks, and the states [R, n, H, k, v] after each chunk.

    x: [R, n, C, ...], n chunks of each row. entry: int32[R, n], what each chunk begins with: the state after an earlier
    chunk of the row (its number), one of the row's `starts` [R, s, H, k, v] (n + its number), or zeros (-1).
    masks: [R, n, ...], where chunks hold tokens of several paths. By default all of a chunk are of one.
    """
    out, known = _forward(x, entry, starts, masks)
    return out, known[:, : entry.shape[1]]


def _forward(x: DeltaInputs, entry: Array, starts: Array, masks: Masks | None) -> tuple[Array, Array]:
    """Outputs, and all states: those after each chunk, `starts` and zeros."""
    n, places = entry.shape[1], _places(entry, starts)
    known = jnp.pad(starts, ((0, 0), (n, 1), (0, 0), (0, 0), (0, 0)))

    def step(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, known = carry
        own, own_masks = jax.tree.map(lambda each: each[:, number], (x, masks))
        found, after = chunk_step(own, _take(known, places[:, number]), own_masks)
        return out.at[:, number].set(found), known.at[:, number].set(after)

    return jax.lax.fori_loop(0, n, step, (jnp.zeros_like(x.v), known))


def _places(entry: Array, starts: Array) -> Array:
    """Indices into the states after all chunks, `starts`, and zeros."""
    return jnp.where(entry < 0, entry.shape[1] + starts.shape[1], entry)


def _take(states: Array, place: Array) -> Array:
    return jnp.take_along_axis(states, place[:, None, None, None, None], axis=1)[:, 0]


def _chunked_forward(x: DeltaInputs, entry: Array, starts: Array, masks: Masks | None) -> tuple[Any, Any]:
    out, known = _forward(x, entry, starts, masks)
    return (out, known[:, : entry.shape[1]]), (x, entry, starts, masks, known)


def _chunked_backward(residuals: Any, cotangents: tuple[Array, Array]) -> tuple[DeltaInputs, None, Array, None]:
    x, entry, starts, masks, known = residuals
    d_out, d_after = cotangents
    n, places = entry.shape[1], _places(entry, starts)
    rows = jnp.arange(len(entry))
    d_known = jnp.pad(d_after, ((0, 0), (0, starts.shape[1] + 1), (0, 0), (0, 0), (0, 0)))

    def step(back: Array, carry: tuple[DeltaInputs, Array]) -> tuple[DeltaInputs, Array]:
        d_x, d_known = carry
        number = n - 1 - back
        own, own_masks = jax.tree.map(lambda each: each[:, number], (x, masks))
        place = places[:, number]
        pull = jax.vjp(lambda x, state: chunk_step(x, state, own_masks), own, _take(known, place))[1]
        d_own, d_state = pull((d_out[:, number], d_known[:, number]))
        d_x = jax.tree.map(lambda all_, each: all_.at[:, number].set(each), d_x, d_own)
        return d_x, d_known.at[rows, place].add(d_state)

    d_x, d_known = jax.lax.fori_loop(0, n, step, (jax.tree.map(jnp.zeros_like, x), d_known))
    return d_x, None, d_known[:, n : n + starts.shape[1]], None


chunked.defvjp(_chunked_forward, _chunked_backward)


def masks_of(segments: Array) -> Masks:
    """The masks of chunks [R, n, C] that follow each other in a row and hold several segments, 0 for padding."""
    R, n, C = segments.shape
    flat = segments.reshape(R, -1)
    latest = jax.lax.cummax(jnp.where(flat > 0, jnp.arange(n * C), -1), axis=1)  # the last token that is in a segment
    of_latest = jnp.where(latest >= 0, jnp.take_along_axis(flat, jnp.maximum(latest, 0), axis=1), 0).reshape(R, n, C)
    last = of_latest[..., -1]
    before = jnp.pad(last, ((0, 0), (1, 0)))[:, :-1]
    same = segments[..., :, None] == segments[..., None, :]
    return Masks(same, segments == before[..., None], segments == last[..., None], last == before)


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
        starts = jnp.zeros((N, 0, H, dk, dv), x.v.dtype)
    else:
        starts, entry = state[:, None], entry.at[:, 0].set(n)
    out, after = chunked(jax.tree.map(cut, x), entry, starts, None if segments is None else masks_of(cut(segments)))
    return out.reshape(N, n * size, H, dv)[:, :L], after[:, -1]


def _cut(x: Array, count: int, size: int) -> Array:
    x = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], count, size, *x.shape[2:])
