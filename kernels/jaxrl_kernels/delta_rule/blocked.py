"""The gated delta rule in JAX: a loop over the chunks of all rows, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.delta_rule.chunk import Chunk, Shares, solved_by_substitution, step
from jaxrl_kernels.partition import zeros

Array = jax.Array


class DeltaInputs(NamedTuple):
    """What tokens [...] bring to the rule, of H heads of values and K of keys, of which H is a multiple.

    q, k and v in any dtype, g and beta in that of states; a token that changes nothing has g = 0 and beta = 0.
    """

    q: Array  # [..., K, k], scaled
    k: Array  # [..., K, k], of length at most 1
    v: Array  # [..., H, v]
    g: Array  # [..., H], at most 0
    beta: Array  # [..., H]


Given = tuple[DeltaInputs, Shares | None]


def forward(given: Given, places: Array, starts: Array) -> tuple[Array, Array, Array]:
    """Outputs [R, n, C, H, v], the states [R, H, k, v] after the last chunk, and those after each, [R, n, H, k, v].

    places: int32[R, n], where among the states after chunks and `starts` [R, s, H, k, v] each chunk finds its own.
    """
    n, v = places.shape[1], given[0].v
    known = _after(zeros((len(places), n, *starts.shape[2:]), starts.dtype, starts), starts)

    def one(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, known = carry
        x, shares = _of_chunk(given, number)
        found, after = _step(x, shares, _take(known, places[:, number]))
        return out.at[:, number].set(found), known.at[:, number].set(after)

    out, known = jax.lax.fori_loop(0, n, one, (_like(v), known))
    return out, known[:, n - 1], known[:, :n]


def backward(
    given: Given, places: Array, starts: Array, after: Array, d_out: Array, d_last: Array
) -> tuple[DeltaInputs, Array]:
    """The cotangents of the inputs and of `starts`."""
    n, rows = places.shape[1], jnp.arange(len(places))
    known = _after(after, starts)
    d_known = _after(_like(after), _like(starts)).at[:, n - 1].set(d_last)

    def one(back: Array, carry: tuple[DeltaInputs, Array]) -> tuple[DeltaInputs, Array]:
        d_x, d_known = carry
        number = n - 1 - back
        (x, shares), place = _of_chunk(given, number), places[:, number]
        pull = jax.vjp(lambda x, state: _step(x, shares, state), x, _take(known, place))[1]
        d_own, d_state = pull((d_out[:, number], d_known[:, number]))
        d_x = jax.tree.map(lambda all_, own: all_.at[:, number].set(own), d_x, d_own)
        return d_x, d_known.at[rows, place].add(d_state)

    d_x, d_known = jax.lax.fori_loop(0, n, one, (jax.tree.map(_like, given[0]), d_known))
    return d_x, d_known[:, n:]


def heads_first(x: DeltaInputs) -> Chunk:
    """Chunks [..., C, heads, m] as `chunk.step` takes them."""
    tokens = (jnp.swapaxes(each, -2, -3) for each in (x.q, x.k, x.v))
    return Chunk(*tokens, *(jnp.swapaxes(each, -1, -2)[..., None, :] for each in (x.g, x.beta)))


def _step(x: DeltaInputs, shares: Shares | None, state: Array) -> tuple[Array, Array]:
    out, after = step(heads_first(x), state, shares, solved_by_substitution)
    return jnp.swapaxes(out, -2, -3), after


def _like(x: Array) -> Array:
    return zeros(x.shape, x.dtype, x)


def _after(states: Array, starts: Array) -> Array:
    return jnp.concatenate([states, starts], axis=1)


def _of_chunk(given: Any, number: Array) -> Any:
    return jax.tree.map(lambda each: each[:, number], given)


def _take(states: Array, place: Array) -> Array:
    return jnp.take_along_axis(states, place[:, None, None, None, None], axis=1)[:, 0]
