"""The compiled half of the sampler: prefill each prompt once, then decode all rows until they end.

P prompts, N rows (samples), T new tokens at most, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.models.policy import Params, Policy, positions_of
from jaxrl_llm.sampling.draw import Drawn, draw, token_keys
from jaxrl_llm.sampling.filters import Filters


class Requests(NamedTuple):
    """What to sample: prompts, and rows that each continue one of them."""

    prompts: jax.Array  # int32[P, Lp], right-padded
    prompt_mask: jax.Array  # bool[P, Lp]
    prompt_of_row: jax.Array  # int32[N]: which prompt a row continues
    prompt_id: jax.Array  # int32[N]: names the randomness, with `sample`
    sample: jax.Array  # int32[N]: number of the sample among those of its prompt
    live: jax.Array  # bool[N]: false for rows that only fill up the shape


class Settings(NamedTuple):
    """How to sample; numbers that may change without a new compilation."""

    key: jax.Array
    temperature: jax.Array  # f32[]
    filters: Filters | None
    stop_tokens: jax.Array  # int32[E]; sampling one ends the row


class DecodeState(NamedTuple):
    """Everything that the loop changes."""

    step: jax.Array  # int32[]: columns of `drawn` that are filled
    cache: decoder.Cache
    position: jax.Array  # int32[N] of the newest token of each row
    drawn: Drawn  # each [N, T]
    length: jax.Array  # int32[N]: tokens drawn so far, the ending one included
    done: jax.Array  # bool[N]


split_layers = jax.jit(decoder.unstack)


def _take(state: DecodeState, new: Drawn, settings: Settings) -> DecodeState:
    """Record a new token of every row that is not done."""
    column = lambda old, x: jax.lax.dynamic_update_slice(  # noqa: E731
        old, jnp.where(state.done, jnp.zeros_like(x), x)[:, None], (0, state.step)
    )
    ends = jnp.any(new.token[:, None] == settings.stop_tokens[None, :], axis=1)
    return state._replace(
        step=state.step + 1,
        drawn=Drawn(*(column(old, x) for old, x in zip(state.drawn, new, strict=True))),
        length=state.length + ~state.done,
        done=state.done | ends,
    )


def _draw(
    policy: Policy, params: Params, hidden: jax.Array, requests: Requests, settings: Settings, at: Any, greedy: bool
):
    keys = token_keys(settings.key, requests.prompt_id, requests.sample, jnp.full_like(requests.sample, at))
    logits = policy.logits_of(params, hidden)
    return draw(logits, keys, settings.temperature, settings.filters, greedy)


@jax.jit(static_argnames=("policy", "new_tokens", "greedy"))
def prefill(
    policy: Policy, params: Params, requests: Requests, settings: Settings, *, new_tokens: int, greedy: bool
) -> DecodeState:
    """Run every prompt once, hand its cache to each of its rows, and draw their first tokens."""
    P, length = requests.prompts.shape
    N = requests.prompt_of_row.shape[0]
    mask = requests.prompt_mask.astype(jnp.int32)
    cache = decoder.empty_cache(policy.config, P, length, policy.dtype, isinstance(params["layers"], dict))
    hidden, cache = policy.forward(params, requests.prompts, positions_of(mask), mask, cache)
    last = jnp.sum(mask, axis=1) - 1
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    rows = requests.prompt_of_row

    cache = decoder.share_cache(cache, rows, new_tokens)
    empty = jnp.zeros((N, new_tokens), jnp.float32)
    state = DecodeState(
        step=jnp.int32(0),
        cache=cache,
        position=last[rows],
        drawn=Drawn(empty.astype(jnp.int32), empty, empty, empty),
        length=jnp.zeros(N, jnp.int32),
        done=~requests.live,
    )
    return _take(state, _draw(policy, params, hidden[rows], requests, settings, 0, greedy), settings)


@jax.jit(static_argnames=("policy", "greedy"), donate_argnames=("state",))
def decode(
    policy: Policy,
    params: Params,
    state: DecodeState,
    requests: Requests,
    settings: Settings,
    until: jax.Array,
    *,
    greedy: bool,
) -> DecodeState:
    """Decode until every row is done or `until` (int32[]) tokens were drawn. The state is donated."""

    def unfinished(state: DecodeState) -> jax.Array:
        return (state.step < until) & ~jnp.all(state.done)

    def advance(state: DecodeState) -> DecodeState:
        newest = jax.lax.dynamic_slice_in_dim(state.drawn.token, state.step - 1, 1, axis=1)
        position = state.position + 1
        hidden, cache = policy.forward(params, newest, position[:, None], jnp.ones_like(newest), state.cache)
        state = state._replace(cache=cache, position=position)
        return _take(state, _draw(policy, params, hidden[:, 0], requests, settings, state.step, greedy), settings)

    return jax.lax.while_loop(unfinished, advance, state)
