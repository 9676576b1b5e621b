"""Speculation: verify several drafted tokens of each row in one pass, without changing what is sampled.

A token is a function of the logits and of (seed, prompt id, sample, position), so a draft is right exactly if it is the
token that is drawn. A pass runs each row's newest token with k drafted tokens, draws the token after each of them, and
keeps those up to and including the first that differs from its draft.

Shapes: R rows; C columns, one for each position of a row, prompt included; T the most own tokens of a row; M tokens of
texts to draft from; k drafted tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels.decode_attention import decode_attention, merge, partial_attention

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.by_row import for_rows
from jaxrl_llm.models.layers.attention import Weighing
from jaxrl_llm.models.layers.parts import rotations_of
from jaxrl_llm.models.layers.recurrent import Carried, committed, pending_flow
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.decode import RingCache, narrowed
from jaxrl_llm.sampling.draw import Drawn, DrawSettings, draw
from jaxrl_llm.sampling.kv_cache import LayerCache, Layers, PrefixCache, each, pack, take_columns, with_sinks
from jaxrl_llm.sampling.rows import RowState
from jaxrl_llm.sampling.two_model_decode import run_both

LONGEST_MATCH = 16  # tokens of a suffix that are compared
LEAST_MATCH = 2  # a shorter match drafts nothing
MOST_MISSES = (LONGEST_MATCH - LEAST_MATCH) // 2


class Tail(NamedTuple):
    """Rows that advance by different numbers of tokens. The token at position p is in column p."""

    layers: Layers
    tokens: Array  # int32[R, C]; -1 where there is none yet
    drawn: Drawn  # each [R, T], own token n in column n; only those drawn here
    misses: Array  # int32[R], drafts in a row of which no token was right, at most MOST_MISSES


class TailCounts(NamedTuple):
    """Counts of one call of `verify`."""

    steps: Array  # int32[], passes
    live: Array  # int32[], rows of all passes that drew a token
    tokens: Array  # int32[], drawn and kept
    drafted: Array  # int32[]
    accepted: Array  # int32[], drafted tokens that were right


class Draft(NamedTuple):
    """Drafted tokens of each row."""

    tokens: Array  # int32[R, k]
    number: Array  # int32[R], how many of them there are, 0 to k


@jax.jit
def tail_of(
    prefix_cache: PrefixCache, ring_cache: RingCache, rows: Array, slot: Array, own: Array, tokens: Array
) -> Tail:
    """The tail of some rows of the engine.

    rows: int32[R]; slot: int32[R], their prompt slots; own: int32[R], own tokens before the newest.
    tokens: int32[R, C].
    """
    length, at = prefix_cache.length[slot][:, None], jnp.arange(tokens.shape[1])[None]

    def layer(prefix: Any, ring: Any) -> Any:
        if isinstance(ring, Carried):
            return jax.tree.map(lambda x: x[rows], ring)
        if ring is None:
            return None
        P, S = prefix.values.shape[2], ring.values.shape[2]
        in_prompt = jnp.clip(at - jnp.maximum(length - P, 0), 0, P - 1)
        in_ring = (ring_cache.step - own[:, None] + at - length) % S

        def both(of_prompts: Array, of_rows: Array, axis: int) -> Array:
            where = jnp.expand_dims(at < length, tuple(a for a in range(1, of_rows.ndim) if a != axis))
            old = take_columns(of_prompts[slot], in_prompt, axis)
            return jnp.where(where, old, take_columns(of_rows[rows], in_ring, axis))

        return each(both, prefix, ring)

    layers = tuple(layer(*pair) for pair in zip(prefix_cache.layers, ring_cache.layers, strict=True))
    drawn = jax.tree.map(lambda x: jnp.zeros((rows.shape[0], *x.shape[1:]), x.dtype), ring_cache.drawn)
    return Tail(layers, tokens, drawn, jnp.zeros_like(rows))


@jax.jit
def rows_at(tail: Tail, rows: Array) -> Tail:
    """Some rows of a tail. rows: int32[R']."""
    return jax.tree.map(lambda x: x[rows], tail)


@jax.named_scope("drafts")
def drafts(tail: Tail, position: Array, sources: Array, most: int) -> Draft:
    """What followed the longest match of each row's last tokens, in its own text or in its sources; the latest of them.

    position: int32[R], of the newest tokens; sources: int32[R, M], texts with -1 between them; most: k. A row whose
    last drafts were wrong needs a longer match: 2 more tokens for each.
    """
    texts = jnp.concatenate([sources, tail.tokens], axis=1)
    index = jnp.arange(texts.shape[1])[None]
    length, alike = jnp.zeros_like(texts), jnp.ones(texts.shape, bool)
    for back in range(LONGEST_MATCH):
        last = jnp.take_along_axis(tail.tokens, jnp.maximum(position - back, 0)[:, None], axis=1)
        last = jnp.where((position >= back)[:, None], last, -2)
        alike &= jnp.pad(texts, ((0, 0), (back, 0)), constant_values=-1)[:, : texts.shape[1]] == last
        length += alike
    length = jnp.where(index == sources.shape[1] + position[:, None], 0, length)  # the suffix itself
    end = jnp.argmax(length * texts.shape[1] + index, axis=1)
    found = jnp.take_along_axis(length, end[:, None], axis=1)[:, 0] >= LEAST_MATCH + 2 * tail.misses
    after = end[:, None] + 1 + jnp.arange(most)[None]
    found_tokens = jnp.take_along_axis(texts, jnp.minimum(after, texts.shape[1] - 1), axis=1)
    tokens = jnp.where(after < texts.shape[1], found_tokens, -1)
    count = jnp.sum(jnp.cumprod(tokens >= 0, axis=1), axis=1)
    return Draft(jnp.maximum(tokens, 0), jnp.where(found, count, 0))


@jax.jit(static_argnames=("policy", "width"), donate_argnames=("tail",))
def verify(
    policy: Policy,
    params: Params,
    tail: Tail,
    rows: RowState,
    sources: Array,
    settings: DrawSettings,
    most: Array,
    *,
    width: int,
) -> tuple[Tail, RowState, TailCounts]:
    """Decode until all rows are done, at most `most` (int32[]) passes. The tail is donated. No row may be fresh.

    width: the most tokens drafted for a row. Where fewer than half of the rows that are not done have drafts, a pass
    runs the newest tokens alone.
    """
    params = for_rows(policy, narrowed(policy, params), rows.adapter)
    Carry = tuple[Tail, RowState, TailCounts, Draft]

    def draft(tail: Tail, rows: RowState) -> Draft:
        found = drafts(tail, rows.prompt + rows.own, sources, width)
        return found._replace(number=jnp.where(rows.done, 0, found.number))

    def unfinished(carry: Carry) -> Array:
        return (carry[2].steps < most) & ~jnp.all(carry[1].done)

    def drafted(carry: Carry) -> Array:
        return 2 * jnp.sum(carry[3].number > 0) >= jnp.sum(~carry[1].done)

    def advance(carry: Carry, few: int) -> Carry:
        tail, rows, counts, found = carry
        found = Draft(found.tokens[:, :few], jnp.minimum(found.number, few))
        tail, rows, counts = _advance(policy, params, tail, rows, counts, found, settings)
        return tail, rows, counts, draft(tail, rows)

    def alternate(carry: Carry) -> Carry:
        carry = jax.lax.while_loop(lambda c: unfinished(c) & ~drafted(c), partial(advance, few=0), carry)
        return jax.lax.while_loop(lambda c: unfinished(c) & drafted(c), partial(advance, few=width), carry)

    zero = TailCounts(*[jnp.int32(0)] * 5)
    return jax.lax.while_loop(unfinished, alternate, (tail, rows, zero, draft(tail, rows)))[:3]


def _advance(
    policy: Policy, params: Params, tail: Tail, rows: RowState, counts: TailCounts, draft: Draft, settings: DrawSettings
) -> tuple[Tail, RowState, TailCounts]:
    """One pass over the newest token and the draft of each row."""
    R, k = draft.tokens.shape
    position, config = rows.prompt + rows.own, policy.config
    ahead = jnp.arange(k + 1)[None]
    tokens, positions = jnp.concatenate([rows.newest[:, None], draft.tokens], axis=1), position[:, None] + ahead
    # XLA on CPU recomputes rotations for every head unless they are computed before.
    rotated = jax.lax.optimization_barrier(rotations_of(config, positions))
    record = tail.drawn.experts is not None
    hidden, layers = run_both(
        policy, params, tokens, positions, partial(_attend, position), tail.layers, rotations=rotated, record=record,
        again=lambda got, left: left, flow=pending_flow(),  # a layer that attends to another's keys writes them again
    )  # fmt: skip
    layers, experts = layers if record else (layers, None)
    at = rows.own[:, None] + 1 + ahead  # which own token each of the new ones is
    counters = jnp.stack(jnp.broadcast_arrays(settings.seed, rows.prompt_id[:, None], rows.sample[:, None], at), axis=2)
    flat = hidden.reshape(R * (k + 1), -1), counters.reshape(-1, 4).astype(jnp.uint32)
    new = draw(policy, params, *flat, settings, ranked=tail.drawn.ranks)
    new = jax.tree.map(lambda x: x.reshape(R, k + 1, *x.shape[1:]), new)._replace(experts=experts)
    right = (new.token[:, :k] == draft.tokens) & (ahead[:, :k] < draft.number[:, None])
    right_count = jnp.sum(jnp.cumprod(right, axis=1), axis=1)
    # -1 comes from logits that are not finite: the host reports it.
    ends = jnp.any(new.token[:, :, None] == settings.stop_tokens, axis=2) | (at + 1 >= rows.limit[:, None])
    ends |= new.token < 0
    kept = (ahead <= right_count[:, None]) & (jnp.cumsum(ends, axis=1) - ends == 0) & ~rows.done[:, None]
    count = jnp.sum(kept, axis=1)

    def put(old: Array, x: Array, column: Array) -> Array:
        return old.at[jnp.arange(R)[:, None], jnp.where(kept, column, old.shape[1])].set(x, mode="drop")

    newest = jnp.take_along_axis(new.token, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    tried = (draft.number > 0) & ~rows.done
    misses = jnp.where(right_count > 0, 0, jnp.minimum(tail.misses + 1, MOST_MISSES))
    tail = Tail(
        tuple(committed(layer, count) if isinstance(layer, Carried) else layer for layer in layers),
        put(tail.tokens, new.token, positions + 1),
        jax.tree.map(partial(put, column=at), tail.drawn, new),
        jnp.where(tried, misses, tail.misses),
    )
    added = (
        1, jnp.sum(~rows.done), jnp.sum(count), jnp.sum(jnp.where(rows.done, 0, draft.number)),
        jnp.sum(jnp.maximum(count - 1, 0)),
    )  # fmt: skip
    counts = TailCounts(*(old + jnp.int32(x) for old, x in zip(counts, added, strict=True)))
    rows = rows._replace(
        own=rows.own + count, newest=jnp.where(rows.done, rows.newest, newest),
        done=rows.done | jnp.any(ends & kept, axis=1),
    )  # fmt: skip
    return tail, rows, counts


@jax.named_scope("attention")
def _attend(
    position: Array, q: Array, k: Array, v: Array, memory: LayerCache, how: Weighing
) -> tuple[Array, LayerCache]:
    """Attention of the newest tokens, q [R, W, H, h], to the cache and to those among them that are not later.

    position: int32[R], of the first. k, v: [R, W, K, h], written to the columns from `position` on. Columns of tokens
    that turn out to be wrong are overwritten before any query attends to them.
    """
    R, W, H, h = q.shape
    K, window = memory.keys.shape[1], how.window
    numbers: Any = {"query_scale": how.scale, "softcap": how.softcap}
    q = q.reshape(R, W, K, H // K, h).swapaxes(1, 2)
    ahead = jnp.arange(W)
    old = decode_attention(
        q, memory.keys, memory.values, position, position[:, None] + ahead, key_scale=memory.key_scale,
        value_scale=memory.value_scale, window=window, **numbers,
    )  # fmt: skip
    old = with_sinks(old, q, how)
    new = pack(k, v, memory.keys.dtype)
    distance = ahead[:, None] - ahead[None, :]
    seen = (distance >= 0) & (distance < window if window else True)
    seen = jnp.broadcast_to(seen, (R, W, W))
    among = partial_attention(q, new.keys, new.values, seen, new.key_scale, new.value_scale, **numbers)
    y = merge(old, among).astype(q.dtype).swapaxes(1, 2).reshape(R, W, H, -1)

    def put(store: Array, x: Array, axis: int) -> Array:
        """Write x from column `position` on, which columns there are enough of."""
        put_row = partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)
        return jax.vmap(put_row)(store, x, position)

    return y, each(put, memory, new)
