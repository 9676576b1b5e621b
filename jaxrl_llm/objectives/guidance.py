"""Tokens that another policy, or this one with help, chose: they are learnt from without a ratio."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.log_ratios import LARGEST
from jaxrl_llm.objectives.averages import Average
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, weighted
from jaxrl_llm.transform import Metrics


def shaped_probability(logp: jax.Array, constant: float | jax.Array = 0.1) -> jax.Array:
    """f(p) = p / (p + constant), p = exp(logp); elementwise (LUFFY, 2504.14945).

    Its gradient in logp, constant p / (p + constant)^2, is greatest at p = constant: rare tokens count more than by
    their probability, and tokens that are sure already hardly.
    """
    p = jnp.exp(jnp.minimum(logp, LARGEST))
    return p / (p + constant)


def guided_tokens(batch: Trajectories) -> jax.Array:
    """bool[N, L]: actions not sampled from the plain prompt: info "guided", bool[N, L] or bool[N]; without it none."""
    marked = (batch.info or {}).get("guided")
    if marked is None:
        return jnp.zeros(batch.action_mask.shape, bool)
    return (marked if marked.ndim == 2 else marked[:, None]).astype(bool) & batch.action_mask


def guided_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: the rows with a guided token."""
    return jnp.any(guided_tokens(batch), axis=1)


def guided(sampled: Surrogate, constant: float = 0.1) -> Surrogate:
    """A f(p) with `shaped_probability` f on guided tokens, neither ratio nor clip; `sampled` on all others.

    Without guided tokens it is `sampled`. Statistics: those of `sampled`, 0 on guided tokens, and "guided/share".
    """
    check_number("constant", constant, above=0)

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        here = guided_tokens(batch)
        value, statistics = sampled(jnp.where(here, 1.0, ratio), outputs, batch)
        logp = jnp.where(here & (batch.loss_weights != 0), outputs.logp, 0.0)
        taught = batch.need("advantages") * shaped_probability(logp, constant)
        others = {name: jnp.where(here, 0.0, x) for name, x in statistics.items()}
        return jnp.where(here, taught, value), {**others, "guided/share": here.astype(jnp.float32)}

    return surrogate


def summed(length: float) -> Average:
    """Sum over all tokens of the batch / length: it grows with the batch. length > 0, or InputError."""
    check_number("length", length, above=0)
    return Average(lambda values, batch: jnp.sum(weighted(values, batch)) / length)
