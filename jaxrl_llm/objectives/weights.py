"""Weights of the score function, as functions of the ratio.

Each function returns a `Weight` for `surrogates.log_probability`, which applies it under stop-gradient. Weights can be
multiplied (`product`), chosen by the sign of the advantage (`by_sign`), and computed from a ratio that is scaled first
(`of_scaled_ratio`).
"""

import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core.annotations import NonNegativeNumber, Number, PositiveNumber
from jaxrl_llm.core.parts import Array, Trajectories, part, step_part
from jaxrl_llm.utils.errors import require_choice

Weight = Callable[[Array, Trajectories], Array]  # (ratio f32[N, L], batch) -> f32[N, L]
DIVERGENCES = ("tv", "kl")
MIN_RATIO = 1e-8  # lower bound of a sequence's ratio, as in the code of VESPO


@part
def clipped(low: NonNegativeNumber, high: NonNegativeNumber | None = None) -> Weight:
    """clip(rho, 1 - low, 1 + high): every token keeps its gradient (CISPO, 2506.13585).

    low >= 1: no lower bound. high defaults to low.
    """
    high = low if high is None else high
    return lambda ratio, batch: jnp.clip(ratio, 1 - low, 1 + high)


@part
def capped(cap: PositiveNumber) -> Weight:
    """min(rho, cap): truncated importance sampling. cap > 0."""
    return lambda ratio, batch: jnp.minimum(ratio, cap)


@part
def within(low: NonNegativeNumber, high: NonNegativeNumber | None = None) -> Weight:
    """0 where PPO's clip removes the gradient: A > 0 and rho > 1 + high, or A < 0 and rho < 1 - low; else 1.

    high defaults to low.
    """
    high = low if high is None else high

    def weight(ratio: Array, batch: Trajectories) -> Array:
        A = batch.need("advantages")
        return jnp.where(((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low)), 0.0, 1.0)

    return weight


def gamma_weight(ratio: Array, power: Number, decay: Number) -> Array:
    """phi(W) = W^power exp(decay (1 - W)): 1 at W = 1, maximal at W = power / decay (VESPO, 2602.10693); elementwise.

    W is clamped at 1e-8.

    >>> [round(float(x), 4) for x in gamma_weight(jnp.array([0.5, 1.0, 2.0]), 2.0, 3.0)]
    [1.1204, 1.0, 0.1991]
    """
    W = jnp.maximum(ratio, MIN_RATIO)
    return jnp.exp(decay + power * jnp.log(W) - decay * W)


@part
def gamma(power: NonNegativeNumber, decay: PositiveNumber) -> Weight:
    """`gamma_weight` of the ratio. power >= 0, decay > 0."""
    return lambda ratio, batch: gamma_weight(ratio, power, decay)


def bernoulli_kl(p0: Array, p: Array) -> Array:
    """KL between Bernoulli distributions, nats: p0 log(p0/p) + (1 - p0) log((1 - p0)/(1 - p)); elementwise."""
    rest = jnp.log((1 - p0 + 1e-8) / (1 - p + 1e-8))
    return p0 * jnp.log(jnp.maximum(p0, 1e-37) / jnp.maximum(p, 1e-37)) + (1 - p0) * rest


def small_moves(
    p: Array, p0: Array, advantages: Array, low: Number, high: Number, divergence: Literal["tv", "kl"] = "tv"
) -> Array:
    """bool: false where p moved away from p0 in the advantage's direction by more than a bound (DPPO, 2602.04879).

    divergence "tv": p - p0 > high where A > 0, p0 - p > low where A <= 0. "kl": the same with `bernoulli_kl`.
    """
    require_choice("divergence", divergence, DIVERGENCES)
    up = advantages > 0
    if divergence == "tv":
        return jnp.where(up, p - p0 <= high, p - p0 >= -low)
    moved = bernoulli_kl(p0, p)
    return jnp.where(up, (moved <= high) | (p <= p0), (moved <= low) | (p >= p0))


@part
def within_divergence(
    low: NonNegativeNumber, high: NonNegativeNumber | None = None, divergence: Literal["tv", "kl"] = "tv"
) -> Weight:
    """1 where `small_moves`, else 0. The ratio must be to the behaviour policy. Both bounds at least 0; high
    defaults to low.
    """
    high = low if high is None else high

    def weight(ratio: Array, batch: Trajectories) -> Array:
        p0 = jnp.exp(jnp.where(batch.loss_weights != 0, batch.behaviour_logp, 0.0))
        p = jnp.minimum(p0 * ratio, 1.0)
        return small_moves(p, p0, batch.need("advantages"), low, high, divergence).astype(jnp.float32)

    return weight


@step_part
def by_sign(ratio: Array, batch: Trajectories, positive: Weight, negative: Weight) -> Array:
    """`positive` where the advantage is at least 0, else `negative`."""
    return jnp.where(batch.need("advantages") >= 0, positive(ratio, batch), negative(ratio, batch))


@step_part
def product(ratio: Array, batch: Trajectories, *weights: Weight) -> Array:
    """The product of weights."""
    return math.prod((weight(ratio, batch) for weight in weights), start=jnp.ones_like(ratio))


@part
def of_scaled_ratio(weight: Weight, factor: Callable[[Trajectories], Array]) -> Weight:
    """The weight of ratio * factor(batch) f32[N, L]; the factor can be the ratio of old to behaviour policy."""
    return lambda ratio, batch: weight(ratio * factor(batch), batch)
