"""Penalties: objectives that keep the policy near a reference, or its entropy up."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import unknown
from jaxrl_llm.objectives.averages import Average, token_mean
from jaxrl_llm.objectives.ratios import log_ratio, needed, source
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.transform import Metrics, Objective


def k1(log_ratio: jax.Array) -> jax.Array:
    """l = logp - logp_ref: an unbiased value, but a zero-mean gradient; for rewards, not for losses."""
    return log_ratio


def k2(log_ratio: jax.Array) -> jax.Array:
    """l^2 / 2: its gradient on-policy is that of KL(pi || ref)."""
    return 0.5 * log_ratio**2


def k3(log_ratio: jax.Array) -> jax.Array:
    """exp(-l) - 1 + l: unbiased and never negative; its gradient on-policy is that of KL(ref || pi) (GRPO)."""
    return jnp.expm1(-log_ratio) + log_ratio


ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {"k1": k1, "k2": k2, "k3": k3}


def kl(to: str = "reference", estimator: str = "k3", average: Average | None = None) -> Objective:
    """Estimated KL divergence of the policy from another on the sampled tokens, nats per token.

    to: "reference", "old" or "behaviour". estimator: k1, k2 or k3 of J. Schulman, Approximating KL Divergence (2020).
    average: default token_mean(). Metric: "kl".
    """
    if estimator not in ESTIMATORS:
        raise unknown("KL estimator", estimator, ESTIMATORS)
    needs = needed(to)
    mean, estimate = average or token_mean(), ESTIMATORS[estimator]

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        value = mean(estimate(log_ratio(outputs.logp, source(batch, to), batch.loss_weights != 0)), batch)
        return value, {"kl": value}

    return Objective(objective, needs)


def entropy(average: Average | None = None) -> Objective:
    """Mean entropy of the policy's token distributions, nats; subtract it (times a coefficient) as a bonus.

    It is differentiated through the distribution itself, not through sampled log-probabilities. Metric: "entropy".
    """
    mean = average or token_mean()

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        value = mean(outputs.entropy, batch)
        return value, {"entropy": value}

    return Objective(objective)
