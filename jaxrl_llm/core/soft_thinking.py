"""Soft thinking: while a row thinks, what the model sees next is a mixture of embeddings, weighed by Gumbel noise.

A soft token is a record f32[3, K] of the K most probable tokens at its place: RECORD = ids, scores g and log p, the
log-probability under the policy that drew it, renormalised over those that were kept. Ids below 0 are of no token: all
K of an ordinary token, and those that top-p did not keep (ids are exact: vocabularies are far smaller than 2^24).

    eps_j ~ Gumbel(0, 1),    g_j = log p_j + eps_j,    y = softmax(g / tau),    the next input is sum_j y_j E[id_j]

The action is g, whose density under other weights is that of Gumbel noise around their log p (2511.06411).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import Count, NonNegativeInt, Positive, Share
from jaxrl_llm.core.repr import layout
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.utils.errors import InputError, shown

Density = Literal["mean", "sum"]
RECORD = 3
LEAST_NOISE, MOST_NOISE = -1.5, 3.0  # of the form "mean"
LEAST_LOGP = -3.0  # "mean" is over tokens that were more probable
OFFSET = 1e-6  # added to probabilities in the form "mean"


@dataclass(frozen=True, repr=False)
class SoftThinking:
    """How a row thinks, from its first token until the most heavily weighed of a mixture is `end`, itself included.

    A static part of a `Policy` (`Policy.thinking`). The tokens after `end` are ordinary ones. As text a soft token is
    the most heavily weighed one. At temperature 0 there is no noise.
    """

    top_k: Count = 5
    """K: a mixture is of the most probable tokens at the sampling temperature; other filters are of ordinary tokens."""
    top_p: Share = 0.95
    """Of these K, the fewest that have this share of their probability, the most probable first."""
    gumbel_temperature: Positive = 0.1
    """tau: towards 0 a mixture becomes one token."""
    end: NonNegativeInt | str = "</think>"
    """The token that ends the thoughts: an id, or a text that is one token."""
    density: Density = "mean"
    """Over the K: "sum", the log-density of g; "mean", its mean over tokens with log p > -3 in the rollout, with
    log(p + 1e-6) for log p, and noise clipped to [-1.5, 3], in sampling too."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, jax.Array):
                raise InputError(f"soft thinking's {name} is an array, but is part of the program: give a plain number")
        check_fields(self)
        if self.end == "":
            raise InputError("end of SoftThinking is '', but must be a token: give its text or its id")

    __repr__ = layout

    def end_token(self, tokenizer: Any) -> int:
        """The id of the token that ends the thoughts. InputError for a text that is no single token."""
        if isinstance(self.end, int):
            return self.end
        encode = getattr(tokenizer, "encode", None)
        if encode is None:
            raise InputError(
                f"thoughts end with {self.end!r}, but the policy has no tokenizer: give the id of the token"
            )
        ids = list(encode(self.end, add_special_tokens=False))
        if len(ids) != 1:
            raise InputError(
                f"thoughts end with {shown(self.end)}, which is {len(ids)} tokens of this model: give a text that is "
                "one token, or its id"
            )
        return int(ids[0])


class Mixed(NamedTuple):
    """What the model sees in place of tokens: sum_j weights_j E[ids_j], where the weights are not all 0."""

    ids: Array  # int32[..., K]
    weights: Array  # f32[..., K]


def no_thoughts(thinking: SoftThinking, *shape: int) -> Array:
    """f32[*shape, 3, K]: the records of ordinary tokens."""
    return jnp.full((*shape, RECORD, thinking.top_k), -1.0)


def is_soft(thoughts: Array) -> Array:
    """bool[...]: which records f32[..., 3, K] are of soft tokens."""
    return thoughts[..., 0, 0] >= 0


def log_probabilities(thinking: SoftThinking, logits: Array, kept: Array) -> Array:
    """f32[..., K]: log p of logits f32[..., K], renormalised over `kept`, bool[..., K]; finite for others, too.

    Differentiable with respect to the logits of those that are kept, also where none is.
    """
    z = jnp.where(kept, logits, -1e30)  # not -inf, of which a softmax over nothing has no gradient
    logp = jax.nn.log_softmax(z, axis=-1)
    if thinking.density == "mean":
        logp = jnp.log(jnp.exp(logp) + OFFSET)
    return jnp.where(kept, logp, 0.0)


def log_density(thinking: SoftThinking, logp: Array, thoughts: Array) -> Array:
    """f32[...]: log f of the scores of records f32[..., 3, K] under log p f32[..., K]; 0 for ordinary tokens.

    Records are data. Which tokens count is fixed when they are drawn.
    """
    ids, scores, drawn = jnp.moveaxis(jax.lax.stop_gradient(thoughts), -2, 0)
    counted = ids >= 0
    noise = scores - logp
    if thinking.density == "mean":
        counted = counted & (drawn > LEAST_LOGP)
        noise = jnp.clip(noise, LEAST_NOISE, MOST_NOISE)
    noise = jnp.where(counted, noise, 0.0)
    total = jnp.sum(jnp.where(counted, -noise - jnp.exp(-noise), 0.0), axis=-1)
    return total / jnp.maximum(jnp.sum(counted, axis=-1), 1) if thinking.density == "mean" else total


def entropy_of_kept(logp: Array, kept: Array) -> Array:
    """f32[...]: entropy in nats of log p f32[..., K] over those that are kept."""
    return -jnp.sum(jnp.where(kept, jnp.exp(logp) * logp, 0.0), axis=-1)


def drawn_thoughts(thinking: SoftThinking, logits: Array, noise_at: Callable[[Array], Array]) -> Array:
    """f32[N, 3, K]: soft tokens of logits f32[N, V], -inf where forbidden.

    noise_at: (ids int32[N, K]) -> f32[N, K], Gumbel noise of each row and token.
    """
    z, ids = jax.lax.top_k(logits, thinking.top_k)
    p = jax.nn.softmax(z, axis=1)
    kept = (jnp.cumsum(p, axis=1) - p < thinking.top_p) & (z > -jnp.inf)
    kept |= jnp.isnan(z)  # what is not finite must show
    logp = log_probabilities(thinking, z, kept)
    noise = noise_at(ids)
    if thinking.density == "mean":
        noise = jnp.clip(noise, LEAST_NOISE, MOST_NOISE)
    records = jnp.stack([ids.astype(jnp.float32), logp + noise, logp], axis=1)
    return jnp.where(kept[:, None], records, -1.0)


def mixture(thinking: SoftThinking, thoughts: Array) -> Mixed:
    """What the model sees of records f32[..., 3, K]; weights of 0 for ordinary tokens."""
    ids, scores, _ = jnp.moveaxis(jax.lax.stop_gradient(thoughts), -2, 0)
    kept = ids >= 0
    y = jax.nn.softmax(jnp.where(kept, scores / thinking.gumbel_temperature, -1e30), axis=-1)
    return Mixed(jnp.maximum(ids, 0).astype(jnp.int32), jnp.where(kept, y, 0.0))


def heaviest(thoughts: Array) -> Array:
    """int32[...]: the most heavily weighed token of records f32[..., 3, K]; -1 where scores are not finite."""
    ids, scores, _ = jnp.moveaxis(thoughts, -2, 0)
    kept = ids >= 0
    best = jnp.argmax(jnp.where(kept, scores, -jnp.inf), axis=-1)
    token = jnp.take_along_axis(ids, best[..., None], axis=-1)[..., 0].astype(jnp.int32)
    return jnp.where(jnp.all(jnp.isfinite(jnp.where(kept, scores, 0.0)), axis=-1), token, -1)
