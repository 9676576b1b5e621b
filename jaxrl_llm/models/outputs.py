"""What a policy says of sampled tokens: log-probability and entropy of each action, never all logits at once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxrl_kernels import fused_logprob

from jaxrl_llm.buckets import bucket
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import decoder
from jaxrl_llm.models.policy import Params, Policy, positions_of
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories


class Layout(NamedTuple):
    """Static bounds that let a batch of groups share its prompts. Every row must keep within them."""

    group_size: int  # rows of a group stand next to each other and begin with the same prompt
    prompt: int  # tokens before the first action, at most
    completion: int  # tokens from the first action on, at most


def policy_outputs(policy: Policy, params: Params, batch: Trajectories, layout: Layout | None = None) -> PolicyOutputs:
    """Log-probability and entropy of each action under `params`, f32[N, L], 0 where there is no action.

    They are of the distribution that was sampled from: at the trajectories' temperature, and of the truncated support
    where top-k, top-p or min-p were on. Differentiable with respect to params.

    With a layout (static) each group's prompt goes through the model once, forward and backward, and the vocabulary is
    only looked at from the first action on; without one, every row goes through as it is. The results are the same.
    """
    place, states = _shared(policy, params, batch, layout) if layout else _plain(policy, params, batch)
    N, T = place.shape
    at = jnp.minimum(place, batch.tokens.shape[1] - 1)
    action = jnp.take_along_axis(batch.action_mask, at, axis=1) & (place < batch.tokens.shape[1])
    floor = batch.support_floor
    temperature = jnp.ones(N) if batch.temperature is None else batch.temperature
    logp, entropy = fused_logprob(
        states.reshape(N * T, -1),
        policy.unembedding(params),
        jnp.take_along_axis(batch.tokens, at, axis=1).reshape(-1),
        temperature=jnp.repeat(temperature, T),
        softcap=policy.config.logit_softcap,
        support_floor=None if floor is None else jnp.take_along_axis(floor, at, axis=1).reshape(-1),
    )

    def spread(values: jax.Array) -> jax.Array:
        values = jnp.where(action, values.reshape(N, T), 0.0)
        return jnp.zeros(batch.tokens.shape, jnp.float32).at[jnp.arange(N)[:, None], place].set(values, mode="drop")

    return PolicyOutputs(logp=spread(logp), entropy=spread(entropy))


def _plain(policy: Policy, params: Params, batch: Trajectories) -> tuple[jax.Array, jax.Array]:
    """Places int32[N, L] of all tokens, and the state [N, L, D] that each was chosen from: that of the one before."""
    real = batch.token_mask.astype(jnp.int32)
    hidden, _ = policy.forward(params, batch.tokens, positions_of(real), real, remat=policy.remat)
    N, L = batch.tokens.shape
    # A row's first token was chosen from nothing; it is never an action.
    return jnp.broadcast_to(jnp.arange(L), (N, L)), jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))


def _shared(policy: Policy, params: Params, batch: Trajectories, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """As `_plain` for the tokens from the first action on, with prompts computed once a group."""
    G, T = layout.group_size, layout.completion
    N, L = batch.tokens.shape
    start = jnp.where(jnp.any(batch.action_mask, axis=1), jnp.argmax(batch.action_mask, axis=1), L)
    # Some rows' first actions may be masked out, or all: what the group shares ends where the first of any row begins.
    start = jnp.repeat(jnp.min(start.reshape(-1, G), axis=1), G)
    # A group without actions may be all prompt, longer than the bound; it counts for nothing, so it may be cut.
    width = min(layout.prompt, L)
    prompts = batch.tokens[::G, :width]
    real = (batch.token_mask[::G, :width] & (jnp.arange(width) < start[::G, None])).astype(jnp.int32)
    cache = decoder.empty_cache(policy.config, N // G, width, policy.dtype, isinstance(params["layers"], dict))
    hidden, cache = policy.forward(params, prompts, positions_of(real), real, cache, remat=policy.remat)
    last = jnp.maximum(width - 1 - jnp.argmax(real[:, ::-1], axis=1), 0)
    states = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    states = jnp.repeat(states, G, axis=0)
    place = start[:, None] + jnp.arange(T)
    if T > 1:
        cache = decoder.share_cache(cache, jnp.arange(N) // G, T - 1)
        inner = jnp.minimum(place[:, : T - 1], L - 1)
        known = (jnp.take_along_axis(batch.token_mask, inner, axis=1) & (place[:, : T - 1] < L)).astype(jnp.int32)
        tokens = jnp.take_along_axis(batch.tokens, inner, axis=1)
        positions = jnp.repeat(jnp.sum(real, axis=1), G)[:, None] + jnp.arange(T - 1)
        hidden, _ = policy.forward(params, tokens, positions, known, cache, remat=policy.remat)
        states = jnp.concatenate([states, hidden], axis=1)
    return place, states


def layout_of(batch: Trajectories, group_size: int) -> Layout:
    """The bounds of a batch whose groups of `group_size` stand together; reads it on the host, buckets the lengths.

    Raises InputError where the rows are not a multiple of `group_size`.
    """
    action, real = np.asarray(batch.action_mask), np.asarray(batch.token_mask)
    N, L = action.shape
    if group_size < 1 or N % group_size:
        raise InputError(f"a batch of {N} rows has no groups of {group_size}: give a group size that divides the rows")
    acts = action.any(axis=1)
    start = np.where(acts, action.argmax(axis=1), L).reshape(-1, group_size).min(axis=1)
    end = L - real[:, ::-1].argmax(axis=1)
    prompt = np.where(start < L, start, 1)
    completion = np.where(acts, end - np.repeat(start, group_size), 1)
    return Layout(group_size, bucket(int(prompt.max())), bucket(int(completion.max()), least=2))
