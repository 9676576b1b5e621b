"""A block of a masked-diffusion model's response: each pass draws some tokens (LLaDA, 2502.09992, section 2.4)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels import fused_logprob

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.draw import DrawSettings, draw, unembedding

PASSES = 1 << 20  # passes are told apart from places, which are below this, in what keys the noise


class Canvas(NamedTuple):
    """R rows of W places, each with a block of B places that is to be filled."""

    tokens: Array  # int32[R, W], what is before the block
    first: Array  # int32[R], column of the block
    block: Array  # int32[R, B], the block's tokens where they are known
    known: Array  # bool[R, B]
    place: Array  # int32[R], places of the response before the block
    prompt_id: Array  # int32[R]
    sample: Array  # int32[R]


@partial(jax.jit, static_argnums=0)
def unmask(policy: Policy, params: Params, canvas: Canvas, settings: DrawSettings) -> tuple[Array, Array]:
    """The tokens of the blocks int32[R, B], and which of them are known bool[R, B]: those up to the first stop token.

    In each pass a token is drawn for every mask, and those stay that have the largest log-probabilities,
    `config.unmasking.at_a_time` of them; the others are masks again. What follows a stop token stays masked. A token's
    noise is keyed on the seed, prompt id, sample number, place and pass.
    """
    own = policy.config.unmasking
    assert own is not None
    (R, B), W = canvas.block.shape, canvas.tokens.shape[1]
    column = canvas.first[:, None] + jnp.arange(B)
    row = jnp.arange(R)[:, None]
    segments = (jnp.arange(W) < canvas.first[:, None] + B).astype(jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(W), (R, W))
    keys = [jnp.broadcast_to(x, (R, B)) for x in (settings.seed, canvas.prompt_id[:, None], canvas.sample[:, None])]

    def free(block: Array, known: Array) -> Array:
        stops = known & jnp.any(block[..., None] == settings.stop_tokens, axis=-1)
        before = jnp.cumsum(stops, axis=1) - stops
        return ~known & (before == 0)

    def fill(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        block, known, number = carry
        tokens = canvas.tokens.at[row, column].set(jnp.where(known, block, own.mask_token))
        hidden, _ = policy.forward(params, tokens, positions, segments)
        place = canvas.place[:, None] + jnp.arange(B) + PASSES * number
        counters = jnp.stack([x.astype(jnp.uint32) for x in (*keys, place)], axis=-1).reshape(R * B, 4)
        drawn = draw(policy, params, hidden[row, column].reshape(R * B, -1), counters, settings)
        token, logp = drawn.token.reshape(R, B), drawn.logp.reshape(R, B)
        # A mask is taken where nothing else is left.
        sure = jnp.where(token == own.mask_token, jnp.finfo(jnp.float32).min, logp)
        sure = jnp.where(free(block, known), sure, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-sure, axis=1, stable=True), axis=1)
        taken = free(block, known) & (rank < own.at_a_time)
        return jnp.where(taken, token, block), known | taken, number + 1

    start = canvas.block, canvas.known, jnp.int32(0)
    block, known, _ = jax.lax.while_loop(lambda carry: jnp.any(free(*carry[:2])), fill, start)
    return block, known


@partial(jax.jit, static_argnums=0)
def mean_field(
    policy: Policy, params: Params, tokens: Array, first: Array, end: Array, length: Array, temperature: Array
) -> tuple[Array, Array]:
    """Log-probability and entropy f32[R, T] of a response's tokens, with nothing but masks in their place.

    tokens: int32[R, W], prompt and response. first, end: int32[R], columns of the response's first place and after that
    of its canvas. length: int32[T], of which the size alone matters. The update finds the same, see
    `models.canvases`.
    """
    own = policy.config.unmasking
    assert own is not None
    (R, W), T = tokens.shape, length.shape[0]
    place = jnp.arange(W)
    masked = jnp.where(place < first[:, None], tokens, own.mask_token)
    segments = (place < end[:, None]).astype(jnp.int32)
    hidden, _ = policy.forward(params, masked, jnp.broadcast_to(place, (R, W)), segments)
    column = jnp.minimum(first[:, None] + jnp.arange(T), W - 1)
    row = jnp.arange(R)[:, None]
    head, states = unembedding(policy, params, hidden[row, column].reshape(R * T, -1))
    known = policy.config.known_tokens
    logp, entropy = fused_logprob(
        states, head, tokens[row, column].reshape(-1), temperature=jnp.full(R * T, temperature),
        softcap=policy.config.logit_softcap, vocab_size=known if known < head.shape[0] else None,
    )  # fmt: skip
    return logp.reshape(R, T), entropy.reshape(R, T)
