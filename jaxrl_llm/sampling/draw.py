"""Draw one token from a hidden state, with its log-probability and the entropy of its distribution."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels import fused_sample, sample_logits

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.filters import Filters, keep, support_floor

Array = jax.Array


class DrawSettings(NamedTuple):
    """How to draw tokens: arrays, so that their values can change without recompilation."""

    seed: Array  # uint32[]
    temperature: Array  # f32[]; 0 is greedy
    filters: Filters | None
    allowed: Array | None  # bool[V], the tokens that may be drawn; None: all
    stop_tokens: Array  # int32[E]; drawing one ends the row


class Drawn(NamedTuple):
    """One drawn token of each row."""

    token: Array  # int32[N]
    logp: Array  # f32[N], under the distribution that it was drawn from
    entropy: Array  # f32[N], of that distribution, in nats
    floor: Array  # f32[N], log-probability at or above which the filters kept tokens; -inf without filters
    untruncated_logp: Array  # f32[N], under the distribution before filters and `allowed`


def seed_of(key: Array) -> Array:
    """uint32[]: the seed of a random key. With prompt id, sample number and position it keys a token's noise."""
    return jax.random.bits(key, dtype=jnp.uint32)


def draw(policy: Policy, params: Params, hidden: Array, counters: Array, settings: DrawSettings) -> Drawn:
    """Draw a token for each row from hidden states [N, D].

    counters: uint32[N, 4], seed, prompt id, sample number and position; the noise is keyed on nothing else. Temperature
    0 takes the most probable token, with its log-probability under the untempered distribution. Without filters and
    `allowed`, accelerators allocate no [N, V] array; with them, the logits are one.
    """
    N = hidden.shape[0]
    if settings.filters is None and settings.allowed is None:
        token, logp, entropy = _fused(policy, params, hidden, counters, settings)
        return Drawn(token, logp, entropy, jnp.full(N, -jnp.inf), logp)
    logits = _logits(policy, params, hidden)
    scaled = logits / jnp.where(settings.temperature > 0, settings.temperature, 1.0)
    permitted = jnp.ones((N, 1), bool)
    if settings.allowed is not None:
        permitted = jnp.pad(settings.allowed, (0, logits.shape[1] - settings.allowed.shape[0]))[None]
    scaled_permitted = jnp.where(permitted, scaled, -jnp.inf)
    floor = jnp.full(N, -jnp.inf)
    if settings.filters is not None:
        kept = keep(scaled_permitted, settings.filters) & permitted
        floor, permitted = support_floor(scaled_permitted, kept), kept
    masked = jnp.where(permitted, scaled, -jnp.inf)
    token, logp, entropy = sample_logits(masked, counters, temperature=jnp.where(settings.temperature > 0, 1.0, 0.0))
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    return Drawn(token, logp, entropy, floor, chosen - jax.nn.logsumexp(scaled, axis=1))


def _unembedding(policy: Policy, params: Params, hidden: Array) -> tuple[Array, Array]:
    """The unembedding [V, D], padded if `weights.take_weights` padded it, and hidden states [N, D] padded to match."""
    head = params["head"] if "head" in params else policy.unembedding(params)
    missing = head.shape[1] - hidden.shape[1]
    return head, jnp.pad(hidden, ((0, 0), (0, missing))) if missing else hidden


def _logits(policy: Policy, params: Params, hidden: Array) -> Array:
    """f32[N, V]; columns beyond the vocabulary are -inf."""
    head, hidden = _unembedding(policy, params, hidden)
    logits = policy.logits_of({"embed": head, "unembed": head}, hidden)
    padding = head.shape[0] > policy.config.vocab_size
    return jnp.where(jnp.arange(head.shape[0]) < policy.config.vocab_size, logits, -jnp.inf) if padding else logits


def _fused(
    policy: Policy, params: Params, hidden: Array, counters: Array, settings: DrawSettings
) -> tuple[Array, Array, Array]:
    unembedding, hidden = _unembedding(policy, params, hidden)
    padded = unembedding.shape[0] > policy.config.vocab_size
    return fused_sample(
        hidden, unembedding, counters, temperature=settings.temperature, softcap=policy.config.logit_softcap,
        vocab_size=policy.config.vocab_size if padded else None,
    )  # fmt: skip
