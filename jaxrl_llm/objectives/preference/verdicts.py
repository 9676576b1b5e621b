"""Losses on single responses that are good or bad."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.choices import Number
from jaxrl_llm.core.ranges import check_number
from jaxrl_llm.utils.errors import InputError


def kto_loss(
    logp: jax.Array,
    ref_logp: jax.Array,
    label: jax.Array,
    kl: jax.Array | float = 0.0,
    *,
    beta: Number = 0.1,
    desirable_weight: Number = 1.0,
    undesirable_weight: Number = 1.0,
) -> jax.Array:
    """KTO (2402.01306) of n responses, f[n]: w_D sigmoid(beta (z - u)) of good, w_U sigmoid(beta (u - z)) of bad ones.

    u = logp - ref_logp, sums over the tokens of each response, f[n]; label bool[n]: true for good. z = max(kl, 0) has
    no gradient: kl is the batch's estimate of KL(policy || reference), nats a response; at 0 the loss is TRL's
    apo_zero_unpaired. beta > 0, weights >= 0. InputError for numbers out of range and for different shapes.
    """
    check_number("beta", beta, above=0)
    check_number("desirable_weight", desirable_weight, least=0)
    check_number("undesirable_weight", undesirable_weight, least=0)
    logp, ref_logp, label = jnp.asarray(logp), jnp.asarray(ref_logp), jnp.asarray(label)
    for name, x in (("ref_logp", ref_logp), ("label", label)):
        if x.shape != logp.shape:
            raise InputError(f"{name} has the shape {list(x.shape)}, but logp {list(logp.shape)}: all are [n]")
    good = label.astype(bool)
    gain = beta * (logp - ref_logp - jax.lax.stop_gradient(jnp.maximum(kl, 0.0)))
    return jnp.where(good, desirable_weight, undesirable_weight) * jax.nn.sigmoid(jnp.where(good, -gain, gain))


def bco_loss(
    logp: jax.Array, ref_logp: jax.Array, label: jax.Array, shift: jax.Array | float = 0.0, *, beta: Number = 0.1
) -> jax.Array:
    """BCO (2404.04656) of n responses, f[n]: -log sigmoid(beta u - shift) of good, -log sigmoid(shift - beta u) of bad.

    Arguments as of `kto_loss`; shift: the mean reward beta u of the responses so far, without gradient.
    """
    check_number("beta", beta, above=0)
    gain = beta * (jnp.asarray(logp) - ref_logp) - jax.lax.stop_gradient(jnp.asarray(shift))
    return jax.nn.softplus(jnp.where(jnp.asarray(label).astype(bool), -gain, gain))
