"""Surrogates: functions of ratio and advantage that are maximised per token, such as clips, also with ranges per token.

Functions named *_value work on plain arrays of any shape; the others return a `Surrogate`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import (
    AboveOne,
    Fraction,
    NonNegative,
    NonNegativeNumber,
    Number,
    Positive,
    PositiveNumber,
)
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, part, surrogate_part
from jaxrl_llm.core.repr import layout
from jaxrl_llm.objectives.ratios import over_span
from jaxrl_llm.utils.errors import InputError, shown

# (ratio f32[N, L], outputs, batch) -> (value to maximise f32[N, L], per-token statistics to average).
# The batch's advantages are 0 on tokens with weight 0, so a surrogate need not mask anything.
Surrogate = Callable[[jax.Array, PolicyOutputs, Trajectories], tuple[jax.Array, Metrics]]


def clipped_value(ratio: jax.Array, advantages: jax.Array, low: Number, high: Number) -> jax.Array:
    """min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, 1707.06347); elementwise.

    >>> print(clipped_value(jnp.array([1.5, 1.5]), jnp.array([1.0, -1.0]), 0.2, 0.2))
    [ 1.2 -1.5]
    """
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


def clip_fractions(ratio: jax.Array, advantages: jax.Array, low: Number, high: Number) -> Metrics:
    """Per-token statistics: 1 where the clip at the lower, or upper, bound removes the gradient, else 0."""
    return {
        "clip/low": ((ratio < 1 - low) & (advantages < 0)).astype(jnp.float32),
        "clip/high": ((ratio > 1 + high) & (advantages > 0)).astype(jnp.float32),
    }


@dataclass(frozen=True, eq=False, repr=False)
class Clip:
    """The surrogate that `clip` returns, with its bounds."""

    low: Number
    high: Number
    dual: Number | None

    def __call__(self, ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        A = batch.need("advantages")
        value = bounded_loss(clipped_value(ratio, A, self.low, self.high), A, self.dual)
        return value, clip_fractions(ratio, A, self.low, self.high)

    __repr__ = layout


@part
def clip(low: Fraction = 0.2, high: NonNegative | None = None, dual: AboveOne | None = None) -> Surrogate:
    """PPO's clipped surrogate; high > low is DAPO's clip-higher. Both at least 0, low at most 1; high defaults to low.

    dual > 1 bounds the loss where A < 0 and the ratio is large: max(value, dual * A) (dual clip, 1912.09729).
    """
    return Clip(low, low if high is None else high, dual)


def soft_gated_value(ratio: jax.Array, advantages: jax.Array, positive: Number, negative: Number) -> jax.Array:
    """(4 / tau) sigmoid(tau (rho - 1)) A, tau = positive where A > 0, else negative (SAPO, 2511.20347); elementwise.

    Its derivative by rho is 4 p (1 - p) A, p = sigmoid(tau (rho - 1)): A at rho = 1, smaller on both sides.

    >>> [round(float(x), 4) for x in soft_gated_value(jnp.array([0.5, 1.0, 3.0]), jnp.ones(3), 1.0, 1.05)]
    [1.5102, 2.0, 3.5232]
    """
    tau = jnp.where(advantages > 0, positive, negative)
    return 4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantages


@surrogate_part
def soft_gate(
    ratio: jax.Array,
    outputs: PolicyOutputs,
    batch: Trajectories,
    positive: PositiveNumber = 1.0,
    negative: PositiveNumber = 1.05,
) -> tuple[jax.Array, Metrics]:
    """`soft_gated_value`: a smooth gate instead of a clip, with a temperature for each sign of A, both above 0."""
    A = batch.need("advantages")
    p = jax.nn.sigmoid(jnp.where(A > 0, positive, negative) * (ratio - 1))
    return soft_gated_value(ratio, A, positive, negative), {"gate/mean": 4 * p * (1 - p)}


def one_sided_log(log_ratio: jax.Array, advantages: jax.Array, low: Number, high: Number) -> jax.Array:
    """The log-ratio d, clipped in the direction of the advantage: min(d, high) for A > 0, max(d, -low) for A < 0.

    Equals sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)), hence 0 where A = 0; elementwise (GMPO, 2507.20673).
    """
    bounded = jnp.where(advantages > 0, jnp.minimum(log_ratio, high), jnp.maximum(log_ratio, -low))
    return jnp.where(advantages == 0, 0.0, bounded)


@part
def geometric_clip(low: NonNegativeNumber = 0.4, high: NonNegativeNumber | None = None) -> Surrogate:
    """g A on each token, g = exp(mean over the row of `one_sided_log`): log-ratios are clipped before the mean.

    low, high >= 0 bound log-ratios: ratios stay in [exp(-low), exp(high)]; high defaults to low. Expects token ratios.
    """
    high = low if high is None else high

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        A, d = batch.need("advantages"), jnp.log(ratio)
        g = jnp.exp(over_span(one_sided_log(d, A, low, high), batch, "sequence", mean=True))
        cut = {"clip/low": (d < -low) & (A < 0), "clip/high": (d > high) & (A > 0)}
        return g * A, {name: x.astype(jnp.float32) for name, x in cut.items()}

    return surrogate


@part
def unclipped() -> Surrogate:
    """rho A: the importance-weighted policy gradient."""
    return lambda ratio, outputs, batch: (ratio * batch.need("advantages"), {})


@part
def log_probability(weight: Callable[[jax.Array, Trajectories], jax.Array] | None = None) -> Surrogate:
    """sg(w) A log pi: the score function weighted by w = `weight(ratio, batch)` under stop-gradient (default 1).

    With w = rho its gradient is that of rho A. Only the gradient of the loss is meaningful, not its value. Raises
    InputError for a weight that is no function.
    """
    if weight is not None and not callable(weight):
        raise InputError(f"the weight of log_probability is {shown(weight)}, but must be a function of (ratio, batch)")

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        w = jnp.ones_like(ratio) if weight is None else jax.lax.stop_gradient(weight(ratio, batch))
        counts = batch.loss_weights != 0
        return w * batch.need("advantages") * jnp.where(counts, outputs.logp, 0.0), {"weight/mean": w}

    return surrogate


Bounds = Callable[[Trajectories], tuple[Number, Number]]  # batch -> (low, high), the ratio's range [1 - low, 1 + high]


def bounded_loss(value: jax.Array, advantages: jax.Array, dual: Number | None) -> jax.Array:
    """max(value, dual A) where A < 0: the dual clip (1912.09729). None: off."""
    return value if dual is None else jnp.where(advantages < 0, jnp.maximum(value, dual * advantages), value)


def gradient_preserving_value(ratio: jax.Array, advantages: jax.Array, low: Number, high: Number) -> jax.Array:
    """min(rho A, clip(rho, 1 - low, (1 + high) rho / sg(rho)) A): above the range the gradient is scaled, not cut.

    Its value is that of the usual clip, its gradient F A grad log pi with F = 1 + high where rho > 1 + high and
    A > 0; 0 where rho < 1 - low and A < 0; else rho (AEPO, 2510.14545; the upper clip of GPPO, 2508.07629).
    """
    held = jax.lax.stop_gradient(ratio)
    upper = (1 + high) * ratio / held
    # Select the branch explicitly, because the gradient of a minimum is ambiguous at ties.
    return jnp.where(
        advantages > 0,
        jnp.where(held > 1 + high, upper, ratio) * advantages,
        jnp.where(held < 1 - low, 1 - low, ratio) * advantages,
    )


@part
def gradient_preserving_clip(
    low: Fraction = 0.2, high: NonNegative | None = None, dual: AboveOne | None = None
) -> Surrogate:
    """`gradient_preserving_value`, optionally with a dual clip. low in [0, 1], high >= 0 (default: low), dual > 1."""
    high = low if high is None else high

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        A = batch.need("advantages")
        value = bounded_loss(gradient_preserving_value(ratio, A, low, high), A, dual)
        return value, clip_fractions(ratio, A, low, high)

    return surrogate


@surrogate_part
def token_clip(
    ratio: jax.Array,
    outputs: PolicyOutputs,
    batch: Trajectories,
    bounds: Bounds,
    dual: AboveOne | None = None,
    revise: Callable[..., jax.Array] | None = None,
) -> tuple[jax.Array, Metrics]:
    """PPO's clip with the per-token range `bounds(batch)`; dual > 1 bounds the loss where A < 0.

    revise: `(advantages, sg(ratio), batch) -> advantages`, for credit that depends on the ratio.
    """
    A, (low, high) = batch.need("advantages"), bounds(batch)
    if revise is not None:
        A = revise(A, jax.lax.stop_gradient(ratio), batch)
    return bounded_loss(clipped_value(ratio, A, low, high), A, dual), clip_fractions(ratio, A, low, high)


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


@surrogate_part
def guided(
    ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories, sampled: Surrogate, constant: Positive = 0.1
) -> tuple[jax.Array, Metrics]:
    """A f(p) with `shaped_probability` f on guided tokens, without ratio and clip; the surrogate `sampled` on others.

    Statistics: those of `sampled`, 0 on guided tokens, and "guided/share".
    """
    here = guided_tokens(batch)
    value, statistics = sampled(jnp.where(here, 1.0, ratio), outputs, batch)
    logp = jnp.where(here & (batch.loss_weights != 0), outputs.logp, 0.0)
    shaped = batch.need("advantages") * shaped_probability(logp, constant)
    others = {name: jnp.where(here, 0.0, x) for name, x in statistics.items()}
    return jnp.where(here, shaped, value), {**others, "guided/share": here.astype(jnp.float32)}
