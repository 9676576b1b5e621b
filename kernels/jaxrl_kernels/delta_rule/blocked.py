"""The gated delta rule in JAX: a loop over the chunks of all rows, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.delta_rule.chunk import DeltaInputs, Shares, step
from jaxrl_kernels.partition import zeros

Array = jax.Array
Given = tuple[DeltaInputs, Shares | None]


def forward(given: Given, places: Array, starts: Array) -> tuple[Array, Array]:
    """Outputs [R, n, H, C, v] and the states [R, n, H, k, v] after each chunk.

    places: int32[R, n], where among the states after chunks and `starts` [R, s, H, k, v] each chunk finds its own.
    """
    n, v = places.shape[1], given[0].v
    known = _after(zeros((len(places), n, *starts.shape[2:]), starts.dtype, starts), starts)

    def one(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, known = carry
        x, shares = _of_chunk(given, number)
        found, after = step(x, _take(known, places[:, number]), shares)
        return out.at[:, number].set(found), known.at[:, number].set(after)

    out, known = jax.lax.fori_loop(0, n, one, (_like(v), known))
    return out, known[:, :n]


def backward(
    given: Given, places: Array, starts: Array, after: Array, d_out: Array, d_after: Array
) -> tuple[DeltaInputs, Array]:
    """The cotangents of the inputs and of `starts`."""
    n, rows = places.shape[1], jnp.arange(len(places))
    known, d_known = _after(after, starts), _after(d_after, _like(starts))

    def one(back: Array, carry: tuple[DeltaInputs, Array]) -> tuple[DeltaInputs, Array]:
        d_x, d_known = carry
        number = n - 1 - back
        (x, shares), place = _of_chunk(given, number), places[:, number]
        pull = jax.vjp(lambda x, state: step(x, state, shares), x, _take(known, place))[1]
        d_own, d_state = pull((d_out[:, number], d_known[:, number]))
        d_x = jax.tree.map(lambda all_, own: all_.at[:, number].set(own), d_x, d_own)
        return d_x, d_known.at[rows, place].add(d_state)

    d_x, d_known = jax.lax.fori_loop(0, n, one, (jax.tree.map(_like, given[0]), d_known))
    return d_x, d_known[:, n:]


def _like(x: Array) -> Array:
    return zeros(x.shape, x.dtype, x)


def _after(states: Array, starts: Array) -> Array:
    return jnp.concatenate([states, starts], axis=1)


def _of_chunk(given: Any, number: Array) -> Any:
    return jax.tree.map(lambda each: each[:, number], given)


def _take(states: Array, place: Array) -> Array:
    return jnp.take_along_axis(states, place[:, None, None, None, None], axis=1)[:, 0]
