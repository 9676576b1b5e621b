"""The compiled decode loop: each step draws one token for every row, until enough rows are done.

A token is drawn from a hidden state, with its log-probability and the entropy of its distribution (`draw`).

B rows, T columns of the ring KV cache (the most tokens that a row can have), V vocabulary. The large arrays stay on the
device between calls (`RingCache`, donated); the few numbers a row that the host needs are copied both ways
(`RowState`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.soft_thinking import mixture, no_thoughts
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.by_row import for_rows
from jaxrl_llm.models.layers.attention import Weighing
from jaxrl_llm.models.layers.parts import Rotations, rotations_of
from jaxrl_llm.models.layers.recurrent import Carried, step_flow
from jaxrl_llm.models.placement import sampler_placement
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.draw import Drawn, DrawSettings, draw
from jaxrl_llm.sampling.draw.logits import where_rows
from jaxrl_llm.sampling.kv_cache import Layers, PrefixCache, PrefixSlots, cascade_attention, no_experts, take_columns
from jaxrl_llm.sampling.rows import RowState
from jaxrl_llm.sampling.two_model_decode import empty_layers, run_both


class RingCache(NamedTuple):
    """The ring KV cache and the tokens drawn. A token drawn at step s is in column s mod T."""

    step: Array  # int32[], number of steps so far
    layers: Layers
    drawn: Drawn  # each [B, T]


class LoopCounts(NamedTuple):
    """Counts of one call of the loop, without the first tokens of fresh rows."""

    steps: Array  # int32[]
    live: Array  # int32[], row-steps that drew a token


@dataclass(frozen=True)
class NarrowedEmbedding:
    """An embedding table with padded rows. It supports only the decoder's lookup of tokens."""

    table: Array  # [V, D or more]
    width: int  # D

    def __getitem__(self, tokens: Array) -> Array:
        return self.table[tokens][..., : self.width]


def narrowed(policy: Policy, params: Params) -> Params:
    """The loop's parameters with a tied embedding read from the padded unembedding, so that neither is copied."""
    if "other" in params:
        params = params | {"other": narrowed(policy, params["other"])}
    D, head = policy.config.hidden_size, params.get("head")
    if policy.config.tie_embeddings and head is not None and head.shape[1] > D:
        return params | {"embed": NarrowedEmbedding(head, D)}
    return params


def empty_ring_cache(
    policy: Policy, rows: int, tokens: int, dtype: Any, record: bool = False, ranked: int = 0
) -> RingCache:
    """An empty ring KV cache for `tokens` own tokens of each row.

    record: with room for their experts. ranked: and for so many of the most probable tokens at each place.
    """
    names, shape = ("token", "logp", "entropy", "floor", "untruncated_logp"), (rows, tokens)
    drawn = Drawn(*(jnp.zeros(shape, jnp.int32 if name == "token" else jnp.float32) for name in names))
    if record:
        drawn = drawn._replace(experts=no_experts(policy.config, rows, tokens))
    if policy.thinking is not None:
        drawn = drawn._replace(thoughts=no_thoughts(policy.thinking, rows, tokens))
    if ranked:
        drawn = drawn._replace(ranked=jnp.zeros((*shape, 3, ranked), jnp.float32))
    return RingCache(jnp.int32(0), empty_layers(policy, rows, tokens, dtype), drawn)


@jax.named_scope("append")
def _append(
    policy: Policy, drawn: Drawn, rows: RowState, new: Drawn, which: Array, column: Array, stop_tokens: Array
) -> tuple[Drawn, RowState]:
    """Append a token to the rows `which`, bool[B]; rows.own counts the tokens before it."""
    if policy.thinking is not None and new.thoughts is not None:
        thought = where_rows(which, new.thoughts, jnp.asarray(rows.thought))
        ended = which & (new.token == policy.thinking.end_token(policy.tokenizer))
        rows = rows._replace(thinking=jnp.asarray(rows.thinking) & ~ended, thought=thought)

    def put(old: Array, x: Array) -> Array:
        new = where_rows(which, x[:, None], jax.lax.dynamic_slice_in_dim(old, column, 1, axis=1))
        return jax.lax.dynamic_update_slice_in_dim(old, new, column, axis=1)

    ends = jnp.any(new.token[:, None] == stop_tokens[None, :], axis=1) | (rows.own + 1 >= rows.limit)
    return jax.tree.map(put, drawn, new), rows._replace(
        newest=jnp.where(which, new.token, rows.newest),
        fresh=rows.fresh & ~which,
        done=rows.done | (which & ends),
        last=jnp.where(which, column, rows.last),
    )


def _draw(
    policy: Policy, params: Params, hidden: Array, rows: RowState, settings: DrawSettings, before: Drawn
) -> Drawn:
    """The next token of each row, from hidden states [B, D], with what the tokens before it record."""
    seeds = jnp.broadcast_to(settings.seed, rows.own.shape)
    counters = jnp.stack([seeds, rows.prompt_id, rows.sample, rows.own], axis=1)
    return draw(policy, params, hidden, counters.astype(jnp.uint32), settings, rows.thinking, before.ranks)


def _slot_of_row(prefix_cache: PrefixCache, prefix_slots: PrefixSlots | None, rows: int) -> Array:
    """int32[B]: the prompt slot of each row."""
    P = prefix_cache.length.shape[0]
    if prefix_slots is None:
        return jnp.arange(rows) // (rows // P)
    return prefix_slots.of_row // (prefix_slots.row.shape[0] // P)


@jax.jit(donate_argnames=("layers",))
def states_of_prompts(
    prefix_cache: PrefixCache, prefix_slots: PrefixSlots | None, layers: tuple[Any, ...], rows: RowState
) -> tuple[Any, ...]:
    """The layers of the ring KV cache (donated), where fresh rows carry what their prompts left."""
    slot = _slot_of_row(prefix_cache, prefix_slots, rows.own.shape[0])
    fresh = rows.fresh & ~rows.done

    def begun(old: Array, of_prompts: Array) -> Array:
        return where_rows(fresh, of_prompts[slot].astype(old.dtype), old)

    pairs = zip(layers, prefix_cache.layers, strict=True)
    return tuple(jax.tree.map(begun, own, prefix) if isinstance(own, Carried) else own for own, prefix in pairs)


class Ends(NamedTuple):
    """What the prompt of each row left at its last token."""

    hidden: Array  # [B, D]
    experts: Array | None  # int[B, layers, k]; None: not recorded


@jax.jit
def ends_of_prompts(prefix_cache: PrefixCache, prefix_slots: PrefixSlots | None, rows: RowState) -> Ends:
    """The ends of the rows' prompts, for `begin`, which then does not depend on how many prompts there are."""
    slot = _slot_of_row(prefix_cache, prefix_slots, rows.own.shape[0])
    experts = prefix_cache.experts
    last = None if experts is None else experts[slot, jnp.maximum(prefix_cache.length[slot] - 1, 0)]
    return Ends(prefix_cache.hidden[slot], last)


@jax.jit(static_argnames=("policy",), donate_argnames=("drawn",))
def begin(
    policy: Policy, params: Params, ends: Ends, drawn: Drawn, step: Array, rows: RowState, settings: DrawSettings
) -> tuple[Drawn, RowState]:
    """Draw the first tokens of fresh rows from the last hidden states of their prompts.

    drawn (donated), step: of the ring KV cache.

    This is a separate program, because the host knows when there are fresh rows. As a branch of the loop's program, its
    collectives would not be ordered with the loop's, which deadlocks XLA on CPU with few threads.
    """
    new = _draw(policy, params, ends.hidden, rows, settings, drawn)
    if ends.experts is not None:
        new = new._replace(experts=ends.experts)
    column = (step - 1) % drawn.token.shape[1]
    return _append(policy, drawn, rows, new, rows.fresh & ~rows.done, column, settings.stop_tokens)


@jax.jit(static_argnames=("policy",), donate_argnames=("ring_cache",))
def decode(
    policy: Policy,
    params: Params,
    prefix_cache: PrefixCache,
    prefix_slots: PrefixSlots | None,
    ring_cache: RingCache,
    rows: RowState,
    settings: DrawSettings,
    leave_at: Array,
    most: Array,
) -> tuple[RingCache, RowState, LoopCounts]:
    """Decode until `leave_at` (int32[]) rows are done, at most `most` (int32[]) steps. The ring KV cache is donated.

    No row may be fresh: call `begin` first.
    """
    T = ring_cache.drawn.token.shape[1]
    params = for_rows(policy, narrowed(policy, params), rows.adapter)
    placed = sampler_placement(policy.config, policy.mesh)

    def rotations(rows: RowState) -> tuple[Rotations, ...]:
        """Rotary embeddings of each row's next position.

        They are carried from the step before, because within the step XLA on CPU recomputes them for every head.
        """
        return rotations_of(policy.config, (rows.prompt + rows.own)[:, None])

    def unfinished(carry: tuple[RingCache, RowState, LoopCounts, Any]) -> Array:
        return (carry[2].steps < most) & (jnp.sum(carry[1].done) < leave_at)

    def advance(carry: tuple[RingCache, RowState, LoopCounts, Any]) -> tuple[RingCache, RowState, LoopCounts, Any]:
        ring_cache, rows, counts, rotated = carry
        position = rows.prompt + rows.own

        def attend(q: Array, k: Array, v: Array, memory: Any, how: Weighing) -> tuple[Array, Any]:
            own, prefix = memory
            lengths = rows.own, prefix_cache.length, position, ring_cache.step
            return cascade_attention(q, k, v, own, prefix, prefix_slots, *lengths, how)

        pairs = zip(ring_cache.layers, prefix_cache.layers, strict=True)
        memory = tuple(own if isinstance(own, Carried) else (own, prefix) for own, prefix in pairs)
        flow = step_flow(~rows.done)
        mixed = None
        if policy.thinking is not None and rows.thought is not None:
            mixed = mixture(policy.thinking, rows.thought[:, None])
        record = ring_cache.drawn.experts is not None
        hidden, layers = run_both(
            policy, params, rows.newest[:, None], position[:, None], attend, memory, rotations=rotated, record=record,
            again=lambda got, left: (left, got[1]),  # another layer's keys are attended to after they are written
            flow=flow, mixed=mixed, placement=placed,
        )  # fmt: skip
        layers, experts = layers if record else (layers, None)
        which = ~rows.done
        rows = rows._replace(own=rows.own + which)
        new = _draw(policy, params, hidden[:, 0], rows, settings, ring_cache.drawn)
        if experts is not None:
            new = new._replace(experts=experts[:, 0])
        drawn, rows = _append(policy, ring_cache.drawn, rows, new, which, ring_cache.step % T, settings.stop_tokens)
        counts = LoopCounts(counts.steps + 1, counts.live + jnp.sum(which, dtype=jnp.int32))
        return RingCache(ring_cache.step + 1, layers, drawn), rows, counts, rotations(rows)

    zero = LoopCounts(jnp.int32(0), jnp.int32(0))
    return jax.lax.while_loop(unfinished, advance, (ring_cache, rows, zero, rotations(rows)))[:3]


@jax.jit
def finished_tokens(drawn: Drawn, rows: Array, last: Array) -> Drawn:
    """The tokens of some rows, each array [k, T] with the newest token last. rows, last: int32[k]."""
    T = drawn.token.shape[1]
    at = (last[:, None] + 1 + jnp.arange(T)) % T
    return jax.tree.map(lambda x: take_columns(x[rows], at, 1), drawn)
