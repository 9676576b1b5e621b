"""Credit of whole replies by a critic with values of states and of replies in them, and a target critic (ArCHer).

A turn is one step of a decision process: the state is the conversation before it, the action the whole reply. Heads 0
and 1 of the critic are Q_1 and Q_2 of a reply, read at its last token; heads 2 and 3 are V_1 and V_2 of the state, read
at the first token of the reply. A value depends on what comes before its token, so Q sees all of a reply but its last
token, which in a finished one only says that it ends.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array


def following(values: Array, mask: Array) -> Array:
    """f32[N, K, H]: the values of the next turn of the row, 0 for the last; mask bool[N, K]: turns that are there.

    >>> following(jnp.array([[[1.0], [2.0], [3.0]]]), jnp.array([[True, False, True]]))[0, :, 0].tolist()
    [3.0, 3.0, 0.0]
    """

    def back(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        own, there = now
        return jnp.where(there[:, None], own, later), later

    turns = (jnp.moveaxis(values, 1, 0), mask.T)
    return jnp.moveaxis(jax.lax.scan(back, jnp.zeros_like(values[:, 0]), turns, reverse=True)[1], 0, 1)
