"""Importance ratios of the current policy to another one, per token, turn, segment or sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Source, Span
from jaxrl_llm.core.log_ratios import LARGEST, log_ratio, needed, source
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories

SPANS = ("token", "turn", "segment", "sequence")


class RatioSpec(NamedTuple):
    """A plain ratio, exp of a clipped log-ratio without stop-gradients, in the terms that kernels take."""

    against: str  # one of SOURCES
    whole_row: bool  # one ratio per row, else one per token
    mean: bool  # mean of a row's log-ratios, else their sum


@dataclass(frozen=True, repr=False)
class Ratio:
    """A function `(outputs, batch) -> f32[N, L]`, and what it needs in the batch."""

    function: Callable[[PolicyOutputs, Trajectories], jax.Array]
    needs: frozenset[str] = frozenset()  # names of batch fields that the loop must provide, e.g. "old_logp"
    spec: RatioSpec | None = None  # equivalent to the function, for kernels; None if the ratio is not a plain one

    def __call__(self, outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return self.function(outputs, batch)

    __repr__ = layout


def log_ratio_to(outputs: PolicyOutputs, batch: Trajectories, against: str) -> jax.Array:
    """`log_ratio` of the current policy to one of SOURCES, f32[N, L]; 0 on tokens with weight 0."""
    return log_ratio(outputs.logp, source(batch, against), batch.loss_weights != 0)


@part
def token_ratio(against: Source = "behaviour") -> Ratio:
    """rho_t = pi(a_t) / pi_against(a_t) for each token, f32[N, L]; 1 on tokens with weight 0.

    against: "behaviour", "old" or "reference"; InputError for another name.
    """
    spec = RatioSpec(against, whole_row=False, mean=True)
    return Ratio(lambda outputs, batch: jnp.exp(log_ratio_to(outputs, batch, against)), needed(against), spec)


@part
def span_ratio(
    span: Span, against: Source = "behaviour", *, mean: bool = True, gradient: Literal["span", "token"] = "span"
) -> Ratio:
    """s = exp(mean or sum of the token log-ratios of a span), on each of its tokens, f32[N, L].

    span: one of SPANS; `batch.turn` gives the turns, info["segment"] int32[N, L] the segments.
    mean: the geometric mean of token ratios (GSPO), else their product (the true ratio of the span).
    gradient: "span" differentiates s with respect to every token of the span; "token" gives each token the value s and
    only its own gradient, s grad log pi: sg(s) exp(logp - sg(logp)), for per-token advantages (GSPO-token, 2507.18071).
    """

    def ratio(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        counts = batch.loss_weights != 0
        values = log_ratio_to(outputs, batch, against)
        s = values if span == "token" else over_span(values, batch, span, mean=mean)
        s = jnp.where(counts, jnp.clip(s, -LARGEST, LARGEST), 0.0)
        if gradient == "token":
            logp = jnp.where(counts, outputs.logp, 0.0)
            s = jax.lax.stop_gradient(s - logp) + logp
        return jnp.exp(s)

    plain = span == "sequence" and gradient == "span"
    needs = needed(against) | span_needs(span)
    return Ratio(ratio, needs, RatioSpec(against, whole_row=True, mean=mean) if plain else None)


def span_needs(span: str) -> frozenset[str]:
    """What a ratio over one of SPANS needs in the batch."""
    return frozenset({"turn": {"turns"}, "segment": {"segment"}}.get(span, ()))


@part
def sequence_ratio(
    against: Source = "behaviour", *, mean: bool = True, gradient: Literal["span", "token"] = "span"
) -> Ratio:
    """`span_ratio` over the whole sequence (GSPO, 2507.18071)."""
    return span_ratio("sequence", against, mean=mean, gradient=gradient)


def over_span(values: jax.Array, batch: Trajectories, span: str, *, mean: bool) -> jax.Array:
    """Mean or sum of values f32[N, L] over each token's span, f32[N, L]; tokens with weight 0 are ignored."""
    counts = (batch.loss_weights != 0).astype(jnp.float32)
    values = values * counts
    if span == "sequence":
        total, number = (jnp.sum(x, axis=1, keepdims=True) for x in (values, counts))
        return jnp.broadcast_to(total / jnp.maximum(number, 1) if mean else total, values.shape)
    keys = batch.turn if span == "turn" else batch.need("segment")
    N, L = values.shape
    # Keys are clipped below L, because a row has no more spans than tokens; -1 means no span.
    segment = (jnp.arange(N)[:, None] * (L + 1) + jnp.clip(keys, -1, L - 1) + 1).reshape(-1)
    total, number = (
        jax.ops.segment_sum(x.reshape(-1), segment, num_segments=N * (L + 1))[segment].reshape(N, L)
        for x in (values, counts)
    )
    return total / jnp.maximum(number, 1) if mean else total
