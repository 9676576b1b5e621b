"""The compiled loop of the sampler: every row takes a token a step, until enough rows are done.

B rows, T columns of the ring (tokens that a row may have), V vocabulary. The large arrays stay on the device from call
to call (`Ring`, donated); what the host decides by, a few numbers a row, comes and goes (`Rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.rope import rotation
from jaxrl_llm.sampling.cache import Lanes, LayerCache, Prefixes, cascade_attention, empty
from jaxrl_llm.sampling.draw import Drawn, Settings, draw

Array = jax.Array


class Ring(NamedTuple):
    """What rows have drawn, and their keys and values. A token drawn at step s stands in column s mod T."""

    step: Array  # int32[], of the steps so far
    layers: tuple[LayerCache, ...]
    drawn: Drawn  # each [B, T]


class Rows(NamedTuple):
    """Where each row is."""

    prompt: Array  # int32[B]: tokens of its prompt
    newest: Array  # int32[B]: its last token, which the model has not seen yet
    own: Array  # int32[B]: own tokens before the newest one
    fresh: Array  # bool[B]: has no token yet
    done: Array  # bool[B]: ended, or empty
    last: Array  # int32[B]: column of the newest token
    limit: Array  # int32[B]: own tokens at which it ends
    prompt_id: Array  # int32[B]: names the randomness, with `sample`
    sample: Array  # int32[B]


class Work(NamedTuple):
    """What a call of the loop did, first tokens of fresh rows apart."""

    steps: Array  # int32[]
    live: Array  # int32[]: row-steps that gave a token


@dataclass(frozen=True)
class Narrowed:
    """An embedding with padded rows, to be indexed by tokens as the decoder does, and for nothing else."""

    table: Array  # [V, D or more]
    width: int  # D

    def __getitem__(self, tokens: Array) -> Array:
        return self.table[tokens][..., : self.width]


def narrowed(policy: Policy, params: Params) -> Params:
    """The loop's parameters, with the padded unembedding as the embedding where both are one: no copy of either."""
    D, head = policy.config.hidden_size, params.get("head")
    if policy.config.tie_embeddings and head is not None and head.shape[1] > D:
        return params | {"embed": Narrowed(head, D)}
    return params


def empty_ring(policy: Policy, rows: int, tokens: int, dtype: Any) -> Ring:
    """Room for `tokens` own tokens of each row."""
    nothing = Drawn(
        *(jnp.zeros((rows, tokens), jnp.int32 if name == "token" else jnp.float32) for name in Drawn._fields)
    )
    return Ring(jnp.int32(0), empty(policy.config, rows, tokens, dtype), nothing)


def no_rows(rows: int) -> Rows:
    """All empty."""
    zeros, ones = jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    return Rows(zeros, zeros, zeros, ~ones, ones, zeros, zeros, zeros, zeros)


def _take(drawn: Drawn, rows: Rows, new: Drawn, which: Array, column: Array, stop_tokens: Array) -> tuple[Drawn, Rows]:
    """Record a new token of the rows `which`, bool[B]; rows.own counts the tokens before it."""

    def put(old: Array, x: Array) -> Array:
        before = jax.lax.dynamic_slice_in_dim(old, column, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(which[:, None], x[:, None], before), column, axis=1)

    ends = jnp.any(new.token[:, None] == stop_tokens[None, :], axis=1) | (rows.own + 1 >= rows.limit)
    return Drawn(*(put(old, x) for old, x in zip(drawn, new, strict=True))), rows._replace(
        newest=jnp.where(which, new.token, rows.newest),
        fresh=rows.fresh & ~which,
        done=rows.done | (which & ends),
        last=jnp.where(which, column, rows.last),
    )


def _draw(policy: Policy, params: Params, hidden: Array, rows: Rows, settings: Settings) -> Drawn:
    """The next token of each row, from hidden states [B, D]."""
    seeds = jnp.broadcast_to(settings.seed, rows.own.shape)
    counters = jnp.stack([seeds, rows.prompt_id, rows.sample, rows.own], axis=1)
    return draw(policy, params, hidden, counters.astype(jnp.uint32), settings)


@jax.jit(static_argnames=("policy",), donate_argnames=("drawn",))
def begin(
    policy: Policy,
    params: Params,
    prefixes: Prefixes,
    lanes: Lanes | None,
    drawn: Drawn,
    step: Array,
    rows: Rows,
    settings: Settings,
) -> tuple[Drawn, Rows]:
    """First tokens of fresh rows, from the ends of their prompts. `drawn`, of the ring, is donated; step: the ring's.

    A program of its own, as the host knows when there are any: in a branch of the loop's program, what devices exchange
    would have no order with what they exchange beside it, which XLA on CPU does not survive with few threads.
    """
    B, P = rows.own.shape[0], prefixes.length.shape[0]
    slot = jnp.arange(B) // (B // P) if lanes is None else lanes.of_row // (lanes.row.shape[0] // P)
    new = _draw(policy, params, prefixes.hidden[slot], rows, settings)
    return _take(drawn, rows, new, rows.fresh & ~rows.done, (step - 1) % drawn.token.shape[1], settings.stop_tokens)


@jax.jit(static_argnames=("policy",), donate_argnames=("ring",))
def decode(
    policy: Policy,
    params: Params,
    prefixes: Prefixes,
    lanes: Lanes | None,
    ring: Ring,
    rows: Rows,
    settings: Settings,
    leave_at: Array,
    most: Array,
) -> tuple[Ring, Rows, Work]:
    """Decode until `leave_at` (int32[]) rows are done, or for `most` (int32[]) steps. The ring is donated.

    No row is fresh: `begin` went before.
    """
    T = ring.drawn.token.shape[1]
    params = narrowed(policy, params)

    def rotations(rows: Rows) -> tuple[Array, Array]:
        """Of each row's next position. Known a step ahead, as in the step XLA on CPU works them out for every head."""
        return rotation(policy.config.ropes, policy.config.head_dim, (rows.prompt + rows.own)[:, None])

    def unfinished(carry: tuple[Ring, Rows, Work, Any]) -> Array:
        return (carry[2].steps < most) & (jnp.sum(carry[1].done) < leave_at)

    def advance(carry: tuple[Ring, Rows, Work, Any]) -> tuple[Ring, Rows, Work, Any]:
        ring, rows, work, turned = carry
        position = rows.prompt + rows.own

        def attend(q: Array, k: Array, v: Array, memory: Any, window: Any) -> tuple[Array, LayerCache]:
            own, prefix = memory
            return cascade_attention(
                q, k, v, own, prefix, lanes, rows.own, prefixes.length, position, ring.step, window, policy.config
            )

        memory = tuple(zip(ring.layers, prefixes.layers, strict=True))
        hidden, layers = policy.run(params, rows.newest[:, None], position[:, None], attend, memory, rotations=turned)
        which = ~rows.done
        rows = rows._replace(own=rows.own + which)
        new = _draw(policy, params, hidden[:, 0], rows, settings)
        drawn, rows = _take(ring.drawn, rows, new, which, ring.step % T, settings.stop_tokens)
        work = Work(work.steps + 1, work.live + jnp.sum(which, dtype=jnp.int32))
        return Ring(ring.step + 1, layers, drawn), rows, work, rotations(rows)

    nothing = Work(jnp.int32(0), jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, (ring, rows, nothing, rotations(rows)))[:3]


@jax.jit
def finished(drawn: Drawn, rows: Array, last: Array) -> Drawn:
    """What some rows have drawn, each [k, T], their newest token last. rows, last: int32[k]."""
    T = drawn.token.shape[1]
    at = (last[:, None] + 1 + jnp.arange(T)) % T
    return Drawn(*(jnp.take_along_axis(x[rows], at, axis=1) for x in drawn))
