"""Penalties: KL divergences, entropy terms, and terms that preserve the likelihood of good answers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Estimator, Gate, NonNegativeNumber, Number, Source
from jaxrl_llm.core.log_ratios import ESTIMATORS, beyond_rounding, log_ratio, needed, source
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, control, part
from jaxrl_llm.objectives.averages import Average, Mean, as_average, averaged, mean_of
from jaxrl_llm.objectives.ratios import log_ratio_to, over_span, span_needs
from jaxrl_llm.utils.errors import unknown


@part
def kl(
    to: Source = "reference",
    estimator: Estimator = "k3",
    average: Average | Mean | None = None,
    *,
    sampled: Source | None = None,
    reverse: bool = False,
    metric: str = "kl",
) -> Objective:
    """Estimated KL divergence of the policy from another on the sampled tokens, nats per token.

    to: "reference", "old", "behaviour" or "previous". estimator: k1, k2 or k3 of J. Schulman, Approximating KL
    Divergence (2020), "abs" for |l|, or one of these followed by "+": its value with the gradient of k2. average:
    default token_mean(). sampled: the policy that drew the tokens, if it is not the current one; multiplies the
    estimate by pi / pi_sampled. Differentiated through both factors, k1 and k3 are then unbiased for KL(pi || other),
    and so are their gradients (2512.02556). With k1 and sampled equal to `to` this is rho log rho. reverse: estimate
    from -l; on samples of the other policy k1 and k3 then estimate KL(other || pi). metric: name of the reported
    metric; in a sum of two such terms the second's is "kl/2", see `Objective`.
    """
    if estimator not in ESTIMATORS:
        raise unknown("KL estimator", estimator, ESTIMATORS)
    needs = needed(to) | (frozenset() if sampled is None else needed(sampled))
    estimate = ESTIMATORS[estimator]

    def divergence(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        l = log_ratio(outputs.logp, source(batch, to), batch.loss_weights != 0)
        values = estimate(-l if reverse else l)
        return values if sampled is None else jnp.exp(log_ratio_to(outputs, batch, sampled)) * values

    return mean_of(divergence, average, metric, needs)


def exact_kl(logp: jax.Array, other: jax.Array, reverse: bool = False) -> jax.Array:
    """KL(pi || other) = sum_v pi(v) (log pi(v) - log other(v)) of log-probabilities [..., V], f32[...].

    reverse: KL(other || pi). Tokens with probability 0 (-inf) under the first policy contribute 0.

    >>> print(exact_kl(jnp.log(jnp.array([0.6, 0.25, 0.15])), jnp.log(jnp.array([0.5, 0.3, 0.2]))).round(5))
    0.02066
    """
    first, second = (other, logp) if reverse else (logp, other)
    drawn = first > -jnp.inf
    first = jnp.where(drawn, first, 0.0)
    return jnp.sum(jnp.where(drawn, jnp.exp(first) * (first - jnp.where(drawn, second, 0.0)), 0.0), axis=-1)


@part
def entropy(average: Average | Mean | None = None, metric: str = "entropy") -> Objective:
    """Mean entropy of the policy's token distributions, nats; subtract it (times a coefficient) as a bonus.

    It is differentiated through the distribution, not through sampled log-probabilities. metric: name of the reported
    metric.
    """
    return mean_of(lambda outputs, batch: outputs.entropy, average, metric)


def corridor(values: jax.Array, low: Number, high: Number) -> jax.Array:
    """max(0, low - x) + max(0, x - high): distance from the interval [low, high]; elementwise."""
    return jax.nn.relu(low - values) + jax.nn.relu(values - high)


@part
def entropy_corridor(
    low: Number | str, high: Number | str, average: Average | Mean | None = None, metric: str = "entropy/outside"
) -> Objective:
    """Mean distance of token entropies from the corridor [low, high] (EPO, 2509.22576); add it as a penalty.

    low, high: numbers, or names of controls.
    """

    def distance(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        least, most = (control(batch, limit) if isinstance(limit, str) else limit for limit in (low, high))
        return corridor(outputs.entropy, least, most)

    return mean_of(distance, average, metric)


@part
def entropy_target(target: Number | str, average: Average | Mean | None = None) -> Objective:
    """Mean distance of token entropies from a target, |H - target|."""
    return entropy_corridor(target, target, average, "entropy/distance")


GATES = ("turn", "sequence", "token")


def likelihood_drop(d: jax.Array, batch: Trajectories, gate: Gate = "turn") -> jax.Array:
    """max(0, d), f32[N, L], d = logp_old - logp, where the sum of d over the token's gate span is > 0; else 0.

    A d up to `log_ratios.ROUNDING` is 0.
    """
    d = beyond_rounding(d)
    of_span = d if gate == "token" else over_span(d, batch, gate, mean=False)
    return jnp.where(jax.lax.stop_gradient(of_span) > 0, jax.nn.relu(d), 0.0)


@part
def likelihood_preserving(
    gate: Gate = "turn", against: Source = "old", final: NonNegativeNumber = 1.0, average: Average | Mean | None = None
) -> Objective:
    """Mean `likelihood_drop` on the tokens of answers with advantage >= 0 (LLDS, 2512.04220).

    against: the policy before the update. The slope jumps at equality with it, so that it must be the trainer's own:
    the sampler's differs by rounding. With a gate other than "token", gains of some tokens can offset drops of others
    in the same turn or sequence. Tokens of other answers count in the mean with value 0. gate: one of GATES. final:
    weight of the last turn's tokens. Metric: "likelihood/fallen".
    """

    def fallen(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        values = likelihood_drop(-log_ratio_to(outputs, batch, against), batch, gate)
        counts = (batch.loss_weights != 0) & (batch.need("advantages") >= 0)
        turn = jnp.where(batch.action_mask, batch.turn, -1)
        scale = jnp.where(turn == jnp.max(turn, axis=1, keepdims=True), final, 1.0)
        return jnp.where(counts, scale * values, 0.0)

    return mean_of(fallen, average, "likelihood/fallen", needed(against) | span_needs(gate))


@part
def imitation(
    rows: Callable[[Trajectories], jax.Array] | None = None,
    average: Average | Mean | None = None,
    metric: str = "imitation",
) -> Objective:
    """Negative log-likelihood of the sampled tokens, -mean(m_i log pi), m = rows(batch) f32[N] (default 1).

    rows=`right_answers()` imitates right answers only. Rows with m = 0 still count in the mean.
    """
    mean = as_average(average)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        logp = jnp.where(batch.loss_weights != 0, outputs.logp, 0.0)
        value = -mean(logp if rows is None else logp * rows(batch)[:, None], batch)
        return value, {metric: value}

    return averaged(objective, mean)


@part
def right_answers(threshold: Number = 0.5) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: 1 for rows with a score above the threshold, else 0."""
    return lambda batch: (batch.scores > threshold).astype(jnp.float32)


@part
def ratio_variance(
    limit: Number = 0.0, against: Source = "behaviour", average: Average | Mean | None = None
) -> Objective:
    """Mean of (rho - 1)^2 - limit: the excess of the chi-square divergence from `against` (2601.03320).

    Metrics: "ratio/variance", the mean of (rho - 1)^2, and "ratio/excess", the loss.
    """
    mean = as_average(average)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        squares = jnp.expm1(log_ratio_to(outputs, batch, against)) ** 2
        excess = mean(squares - limit, batch)
        return excess, {"ratio/variance": mean(squares, batch), "ratio/excess": excess}

    return averaged(objective, mean, needed(against))
