"""The policy-gradient objective: four independent choices, each a small function."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError
from jaxrl_llm.objectives.averages import Average, token_mean
from jaxrl_llm.objectives.penalties import entropy, kl
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.transform import Metrics, Objective, Refresh


def policy_gradient(
    ratio: Ratio,
    surrogate: Surrogate,
    average: Average,
    *,
    needs: Iterable[str] = (),
    refresh: Refresh | None = None,
) -> Objective:
    """-average(surrogate(ratio, advantages)): minimising it raises the probability of what was better than expected.

    needs, refresh: what the surrogate wants beyond the ratio's; see `Objective`.
    Metrics are token means over the batch: "ratio/mean", and those of the surrogate.
    """

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        if batch.advantages is None:
            raise InputError("the batch has no advantages: apply the algorithm's transform before its objective")
        value = ratio(outputs, batch)
        # Tokens that do not count may hold anything: a product with NaN would leak into the gradient.
        masked = batch.replace(advantages=jnp.where(batch.loss_weights != 0, batch.advantages, 0.0))
        gain, statistics = surrogate(value, outputs, masked)
        per_token = token_mean()
        metrics = {name: per_token(x, batch) for name, x in {"ratio/mean": value, **statistics}.items()}
        return -average(gain, batch), metrics

    return Objective(objective, ratio.needs | frozenset(needs), refresh)


def regularised(
    objective: Objective,
    average: Average | None = None,
    *,
    kl_coefficient: float | jax.Array = 0.0,
    entropy_coefficient: float | jax.Array = 0.0,
) -> Objective:
    """objective + kl_coefficient * mean k3 to the reference - entropy_coefficient * mean entropy.

    A term whose coefficient is known to be 0 is left out, and with it the need of a reference policy.
    """
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=average)
    objective -= entropy_coefficient * entropy(average)
    return objective
