"""Guided tokens, from another policy or drawn under another prompt, trained on without an importance ratio."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import Positive
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, part
from jaxrl_llm.objectives.surrogates import Surrogate


def shaped_probability(logp: jax.Array, constant: float | jax.Array = 0.1) -> jax.Array:
    """f(p) = p / (p + constant), p = exp(logp); elementwise (LUFFY, 2504.14945).

    Its gradient with respect to logp, constant p / (p + constant)^2, peaks at p = constant: rare tokens get more weight
    than their probability, and tokens with p near 1 almost none.
    """
    p = jnp.exp(jnp.minimum(logp, LARGEST))
    return p / (p + constant)


def guided_tokens(batch: Trajectories) -> jax.Array:
    """bool[N, L]: actions not sampled from the plain prompt: info["guided"], bool[N, L] or bool[N]; absent: none."""
    marked = (batch.info or {}).get("guided")
    if marked is None:
        return jnp.zeros(batch.action_mask.shape, bool)
    return (marked if marked.ndim == 2 else marked[:, None]).astype(bool) & batch.action_mask


def guided_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows with at least one guided token."""
    return jnp.any(guided_tokens(batch), axis=1)


@part
def guided(sampled: Surrogate, constant: Positive = 0.1) -> Surrogate:
    """A f(p) with `shaped_probability` f on guided tokens, without ratio and clip; the surrogate `sampled` on others.

    Statistics: those of `sampled`, 0 on guided tokens, and "guided/share".
    """

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        here = guided_tokens(batch)
        value, statistics = sampled(jnp.where(here, 1.0, ratio), outputs, batch)
        logp = jnp.where(here & (batch.loss_weights != 0), outputs.logp, 0.0)
        shaped = batch.need("advantages") * shaped_probability(logp, constant)
        others = {name: jnp.where(here, 0.0, x) for name, x in statistics.items()}
        return jnp.where(here, shaped, value), {**others, "guided/share": here.astype(jnp.float32)}

    return surrogate
