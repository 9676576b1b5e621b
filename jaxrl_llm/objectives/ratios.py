"""Importance ratios: how much more probable an action is under one policy than under another.

A ratio names its two ends, and how much of the sequence it spans: a token, a turn, a segment, or the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import require_choice
from jaxrl_llm.log_ratios import LARGEST, log_ratio, needed, source
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories

SPANS = ("token", "turn", "segment", "sequence")


class Extent(NamedTuple):
    """Of the plain ratios, exp of bounded log-ratios, of a token or of a whole row, differentiated as they stand."""

    against: str  # one of SOURCES
    whole_row: bool  # one ratio for a row, else one for each token
    mean: bool  # of a row's log-ratios, else their sum


@dataclass(frozen=True)
class Ratio:
    """A function `(outputs, batch) -> f32[N, L]`, and what it needs of the batch."""

    function: Callable[[PolicyOutputs, Trajectories], jax.Array]
    needs: frozenset[str] = frozenset()  # names of batch fields that the loop must provide, e.g. "old_logp"
    extent: Extent | None = None  # says the same as the function, where it is plain: kernels go by it

    def __call__(self, outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return self.function(outputs, batch)


def log_ratio_to(outputs: PolicyOutputs, batch: Trajectories, against: str) -> jax.Array:
    """`log_ratio` of the current policy against one of SOURCES on the tokens that count, f32[N, L]."""
    return log_ratio(outputs.logp, source(batch, against), batch.loss_weights != 0)


def token_ratio(against: str = "behaviour") -> Ratio:
    """rho_t = pi(a_t) / pi_against(a_t) for each token, f32[N, L]; 1 on tokens that do not count.

    against: "behaviour", "old" or "reference"; InputError for another name.
    """
    extent = Extent(against, whole_row=False, mean=True)
    return Ratio(lambda outputs, batch: jnp.exp(log_ratio_to(outputs, batch, against)), needed(against), extent)


def span_ratio(span: str, against: str = "behaviour", *, mean: bool = True, gradient: str = "span") -> Ratio:
    """s = exp(mean (or sum) of the token log-ratios of a span), on each of its tokens, f32[N, L].

    span: one of SPANS; a turn is told by `batch.turn`, a segment by `info["segment"]` int32[N, L].
    mean: the geometric mean of token ratios (GSPO), else their product (the true ratio of the span).
    gradient: "span" differentiates s by every token of the span; "token" gives each token the value s and the gradient
    s grad log pi of itself, sg(s) exp(logp - sg(logp)), for advantages that differ by token (GSPO-token, 2507.18071).
    """
    require_choice("span", span, SPANS)
    require_choice("gradient", gradient, ("span", "token"))

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
    return Ratio(ratio, needs, Extent(against, whole_row=True, mean=mean) if plain else None)


def span_needs(span: str) -> frozenset[str]:
    """What the batch must say of one of SPANS."""
    return frozenset({"turn": {"turns"}, "segment": {"segment"}}.get(span, ()))


def sequence_ratio(against: str = "behaviour", *, mean: bool = True, gradient: str = "span") -> Ratio:
    """`span_ratio` over the whole sequence (GSPO, 2507.18071)."""
    return span_ratio("sequence", against, mean=mean, gradient=gradient)


def over_span(values: jax.Array, batch: Trajectories, span: str, *, mean: bool) -> jax.Array:
    """Mean or sum of values f32[N, L] over the tokens that count of each token's span, f32[N, L]."""
    counts = (batch.loss_weights != 0).astype(jnp.float32)
    values = values * counts
    if span == "sequence":
        total, number = (jnp.sum(x, axis=1, keepdims=True) for x in (values, counts))
        return jnp.broadcast_to(total / jnp.maximum(number, 1) if mean else total, values.shape)
    keys = batch.turn if span == "turn" else batch.need("segment")
    N, L = values.shape
    # Keys may be any numbers up to L, as there are no more spans than tokens; -1 stands for none.
    place = (jnp.arange(N)[:, None] * (L + 1) + jnp.clip(keys, -1, L - 1) + 1).reshape(-1)
    total, number = (
        jax.ops.segment_sum(x.reshape(-1), place, num_segments=N * (L + 1))[place].reshape(N, L)
        for x in (values, counts)
    )
    return total / jnp.maximum(number, 1) if mean else total
