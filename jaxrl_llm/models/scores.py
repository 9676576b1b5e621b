"""Scores of sequences by a reward model: its head at the last token of each row."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.checks import check_key, check_params, check_tokens
from jaxrl_llm.models.config import ModelConfig, ScoreHead
from jaxrl_llm.models.kinds import TEXT, list_of, require_kind
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.packed_states import packed_states
from jaxrl_llm.models.packing import states_at
from jaxrl_llm.models.parameters import without_critic
from jaxrl_llm.models.policy import Params, Policy, positions_of
from jaxrl_llm.utils.errors import InputError

SPREAD = 0.02  # deviation of a new head, transformers' own


def init_reward_model(
    key: jax.Array,
    policy: Policy,
    params: Params,
    labels: Sequence[str] = ("LABEL_0",),
    step_separator: str | None = None,
) -> tuple[Policy, Params]:
    """A reward model that starts as a policy, and its parameters: those of the policy but for the unembedding, and a
    new head "score" [D, labels], normal with deviation 0.02, in float32.

    labels: names of the scores. step_separator: of a process reward model, the text after each step at whose last token
    the step is scored. Padding has the tokenizer's id of it, or where it has none that of the end, which is then not
    scored. InputError for parameters of another policy, and for labels that are no texts, or none.
    """
    check_key(key)
    check_params(policy, without_critic(params) if isinstance(params, dict) else params)
    require_kind("labels", list(labels) if isinstance(labels, tuple) else labels, list_of(TEXT))
    if not labels:
        raise InputError("a reward model needs at least one label: give its name")
    head = ScoreHead(tuple(labels), padding_of(policy.tokenizer, policy.config), step_separator)
    config = dataclasses.replace(policy.config, score=head)
    weight = SPREAD * jax.random.normal(key, (config.hidden_size, len(labels)))
    own = {name: x for name, x in without_critic(params).items() if name != "unembed"}
    return dataclasses.replace(policy, config=config, critic=None, hook=None), {**own, "score": weight}


def padding_of(tokenizer: Any, config: ModelConfig) -> int | None:
    """The id of padding of a new reward model: the tokenizer's, where it has none the end's, where there is none
    None."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return config.eos_token_ids[0] if pad is None and config.eos_token_ids else pad


def sequence_scores(model: Policy, params: Params, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Scores f32[N, labels], unbounded: the model's score.weight times the last hidden state at one token of each row.

    tokens int32[N, L]; mask bool[N, L] is true on real tokens (None: on all); padding may stand anywhere. The token is
    the last real one whose id is not the padding's (`model.config.score`), as in transformers: a row that ends with an
    end token is scored before it, where the ids of both are the same. A row of nothing else is scored at its first
    token. Differentiable with respect to params.

    InputError for a language model, other shapes and types, unknown tokens, and parameters of another model.
    """
    return _scores(model, params, *_checked(model, params, tokens, mask), everywhere=False)[:, 0]


def token_scores(model: Policy, params: Params, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Scores f32[N, L, labels] at every token, 0 where there is none: of a process reward model, those at the ends of
    steps count. Arguments and errors are those of `sequence_scores`."""
    return _scores(model, params, *_checked(model, params, tokens, mask), everywhere=True)


def _checked(model: Policy, params: Params, tokens: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """int32[N, L] and bool[N, L]."""
    check_params(model, params)
    if model.config.score is None:
        raise InputError("this is a language model, which has no scores: load a reward model (load_reward_model)")
    check_tokens(tokens, mask, model.config.vocab_size)
    tokens = jnp.asarray(tokens, jnp.int32)
    return tokens, jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask) > 0


@jax.jit(static_argnums=0, static_argnames="everywhere")
def _scores(model: Policy, params: Params, tokens: jax.Array, mask: jax.Array, everywhere: bool) -> jax.Array:
    order = jnp.argsort(~mask, axis=1, stable=True)  # real tokens first
    tokens, real = jnp.take_along_axis(tokens, order, axis=1), jnp.take_along_axis(mask, order, axis=1)
    place = jnp.argsort(order, axis=1) if everywhere else score_place(model, tokens, real)[:, None]
    states, _ = packed_states(model, params, tokens, states_at(real, place))
    found = scores_of(params, states).reshape(*place.shape, -1)
    return jnp.where(mask[:, :, None], found, 0.0) if everywhere else found


def scores_of(params: Params, states: jax.Array) -> jax.Array:
    """Scores f32[..., labels] of last hidden states [..., D], in whose dtype the product is made."""
    weight = params["score"].astype(states.dtype)
    return jnp.matmul(states, weight, preferred_element_type=accumulation_dtype(states.dtype))


def score_place(model: Policy, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """int32[N]: the place of the last real token that is no padding, 0 where there is none."""
    pad = model.config.score.pad_token_id if model.config.score else None
    counts = mask if pad is None else mask & (tokens != pad)
    last = tokens.shape[1] - 1 - jnp.argmax(counts[:, ::-1], axis=1)
    return jnp.where(jnp.any(counts, axis=1), last, 0).astype(jnp.int32)


def pooled_states(policy: Policy, params: Params, tokens: jax.Array, mask: jax.Array, pieces: int = 1) -> jax.Array:
    """f32[N, pieces, D]: the means of the last hidden states over as many equal parts of each row's tokens.

    tokens int32[N, L]; mask bool[N, L] is true on real tokens. Of T tokens, piece s has those from floor(s T / pieces)
    up to ceil((s + 1) T / pieces), so that pieces of short rows share tokens and none is empty. A row without a token
    is 0.
    """
    real = mask.astype(jnp.int32)
    hidden, _ = policy.forward(params, tokens, positions_of(real), real)
    count, number = jnp.sum(real, axis=1)[:, None, None], jnp.arange(pieces)[None, :, None]
    place = positions_of(real)[:, None, :]
    inside = (place >= number * count // pieces) & (place < -(-(number + 1) * count // pieces)) & (real > 0)[:, None, :]
    share = inside / jnp.maximum(jnp.sum(inside, axis=2, keepdims=True), 1)
    states = jnp.where(real[:, :, None] > 0, hidden.astype(jnp.float32), 0.0)
    return jnp.einsum("nsl,nld->nsd", share, states, precision=jax.lax.Precision.HIGHEST)
