"""What a policy says of sampled tokens: log-probability and entropy of each action, never all logits at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxrl_kernels import fused_logprob

from jaxrl_llm.buckets import bucket
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import decoder
from jaxrl_llm.models.policy import Params, Policy, positions_of
from jaxrl_llm.models.vocabulary import Source, vocabulary_sum
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories


class Layout(NamedTuple):
    """Static bounds that let a batch of groups share its prompts. Every row must keep within them."""

    group_size: int  # rows of a group stand next to each other and begin with the same prompt
    prompt: int  # tokens before the first action, at most
    completion: int  # tokens from the first action on, at most


class Wanted(NamedTuple):
    """What `policy_outputs` shall find beside log-probabilities and entropies; static."""

    names: tuple[str, ...] = ()  # of MEASURES, "values", "hidden", or "internal_logp"
    temperatures: tuple[float, ...] = ()  # "tempered_logp:T" for each, a multiple of the sampling temperature
    layer: int = 0  # of "internal_logp", counting from 1


# Sums over the vocabulary of what is made of its log-probabilities.
MEASURES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "squared_probability": lambda logp: jnp.exp(2 * logp),
    "cubed_probability": lambda logp: jnp.exp(3 * logp),
    "mean_logp": lambda logp: logp,  # divided by the size of the vocabulary below
}
NOTHING = Wanted()


def policy_outputs(
    policy: Policy, params: Params, batch: Trajectories, layout: Layout | None = None, wanted: Wanted = NOTHING
) -> PolicyOutputs:
    """Log-probability and entropy of each action under `params`, f32[N, L], 0 where there is no action.

    They are of the distribution that was sampled from: at the trajectories' temperature, and of the truncated support
    where top-k, top-p or min-p were on. Differentiable with respect to params.

    With a layout (static) each group's prompt goes through the model once, forward and backward, and the vocabulary is
    only looked at from the first action on; without one, every row goes through as it is. The results are the same.

    What is `wanted` is in `extras`, at each action: MEASURES and tempered log-probabilities of the untruncated
    distribution, under stop-gradient; "values" of the critic, f32[N, L] or [N, L, heads]; "internal_logp", the
    log-probability under the unembedded state after a layer (no last norm); "hidden" [N, L, D].
    """
    view = _view(policy, params, batch, layout)
    logp, entropy = _logp(policy, params, view)
    found = {"logp": logp, "entropy": entropy}
    flat = jax.lax.stop_gradient(view.states.reshape(-1, view.states.shape[-1]))
    source = Source(
        flat, jax.lax.stop_gradient(policy.unembedding(params)), view.temperature, policy.config.logit_softcap
    )
    for name in sorted(set(wanted.names) & set(MEASURES)):
        scale = 1 / policy.config.vocab_size if name == "mean_logp" else 1.0
        found[name] = scale * vocabulary_sum(MEASURES[name], source)
    for times in wanted.temperatures:
        hotter = view._replace(temperature=times * view.temperature, floor=None)
        found[f"tempered_logp:{times:g}"] = jax.lax.stop_gradient(_logp(policy, params, hotter)[0])
    if "internal_logp" in wanted.names:
        inner, weights = inner_policy(policy, params, wanted.layer)
        found["internal_logp"] = _logp(inner, weights, _view(inner, weights, batch, layout)._replace(floor=None))[0]
    if "hidden" in wanted.names:
        found["hidden"] = flat
    if "values" in wanted.names:
        found["values"] = _values(policy, params, view, batch, layout)
    spread = {name: _spread(values, view, batch) for name, values in found.items()}
    return PolicyOutputs(spread.pop("logp"), spread.pop("entropy"), spread or None)


def affinity(
    policy: Policy, params: Params, other: Params, batch: Trajectories, layout: Layout | None = None
) -> jax.Array:
    """sum_v sqrt(p_v q_v) of the policies with two sets of parameters at each action, f32[N, L] (Bhattacharyya)."""
    views = [_view(policy, weights, batch, layout) for weights in (params, other)]
    sources = [
        Source(
            view.states.reshape(-1, view.states.shape[-1]),
            policy.unembedding(weights),
            view.temperature,
            policy.config.logit_softcap,
        )
        for view, weights in zip(views, (params, other), strict=True)
    ]
    return _spread(vocabulary_sum(lambda p, q: jnp.exp((p + q) / 2), *sources), views[0], batch)


def inner_policy(policy: Policy, params: Params, layer: int) -> tuple[Policy, Params]:
    """The policy that unembeds the hidden state after `layer` layers as it is, without the last norm.

    Raises InputError where the model has no such layer.
    """
    if not 1 <= layer <= policy.config.num_layers:
        raise InputError(f"internal_logp: layer is {layer}, but the model has layers 1 to {policy.config.num_layers}")
    config = dataclasses.replace(
        policy.config,
        num_layers=layer,
        window_of_layer=policy.config.window_of_layer[:layer],
        rope_of_layer=policy.config.rope_of_layer[:layer],
        final_norm=False,
    )
    layers = params["layers"]
    first = layers[:layer] if isinstance(layers, tuple) else jax.tree.map(lambda x: x[:layer], layers)
    return dataclasses.replace(policy, config=config), {**params, "layers": first}


class _View(NamedTuple):
    """The states that actions were chosen from, of N rows and T places, and what goes with them."""

    place: jax.Array  # int32[N, T]: the position of the token; may be past the end
    states: jax.Array  # [N, T, D]
    targets: jax.Array  # int32[N * T]
    temperature: jax.Array  # f32[N * T]
    floor: jax.Array | None  # f32[N * T]


def _view(policy: Policy, params: Params, batch: Trajectories, layout: Layout | None) -> _View:
    place, states = _shared(policy, params, batch, layout) if layout else _plain(policy, params, batch)
    at = jnp.minimum(place, batch.tokens.shape[1] - 1)
    temperature = jnp.ones(place.shape[0]) if batch.temperature is None else batch.temperature

    def look(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, at, axis=1).reshape(-1)

    floor = None if batch.support_floor is None else look(batch.support_floor)
    return _View(place, states, look(batch.tokens), jnp.repeat(temperature, place.shape[1]), floor)


def _logp(policy: Policy, params: Params, view: _View) -> tuple[jax.Array, jax.Array]:
    return fused_logprob(
        view.states.reshape(-1, view.states.shape[-1]),
        policy.unembedding(params),
        view.targets,
        temperature=view.temperature,
        softcap=policy.config.logit_softcap,
        support_floor=view.floor,
    )


def _values(policy: Policy, params: Params, view: _View, batch: Trajectories, layout: Layout | None) -> jax.Array:
    from jaxrl_llm.models.critic import values_of

    if policy.critic is None or "critic" not in params:
        raise InputError("this method needs values: give the policy a critic (models.critic)")
    states = view.states
    if policy.critic.kind == "tower":
        states = _view(policy, params["critic"]["tower"], batch, layout).states
    return values_of(policy.critic, params, states.reshape(-1, states.shape[-1]))


def _spread(values: jax.Array, view: _View, batch: Trajectories) -> jax.Array:
    """From places [N * T, ...] to positions f32[N, L, ...], 0 where there is no action."""
    N, T = view.place.shape
    at = jnp.minimum(view.place, batch.tokens.shape[1] - 1)
    action = jnp.take_along_axis(batch.action_mask, at, axis=1) & (view.place < batch.tokens.shape[1])
    values = values.reshape(N, T, *values.shape[1:])
    values = jnp.where(action.reshape(N, T, *[1] * (values.ndim - 2)), values, 0.0)
    empty = jnp.zeros((*batch.tokens.shape, *values.shape[2:]), jnp.float32)
    return empty.at[jnp.arange(N)[:, None], view.place].set(values.astype(jnp.float32), mode="drop")


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
