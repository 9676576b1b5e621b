"""Importance ratios: how much more probable an action is now than under the policy it is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories

SOURCES = {"behaviour": "behaviour_logp", "old": "old_logp", "reference": "reference_logp"}
LARGEST = 20.0  # exp(20) = 5e8: far outside any clip range, and its square is finite in float32


@dataclass(frozen=True)
class Ratio:
    """A function `(outputs, batch) -> f32[N, L]`, and what it needs of the batch."""

    function: Callable[[PolicyOutputs, Trajectories], jax.Array]
    needs: frozenset[str] = frozenset()  # names of batch fields that the loop must provide, e.g. "old_logp"

    def __call__(self, outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return self.function(outputs, batch)


def needed(name: str) -> frozenset[str]:
    """The batch field that the loop must fill in for one of SOURCES; every batch has the behaviour policy's.

    Raises InputError for another name.
    """
    if name not in SOURCES:
        raise unknown("log-probability source", name, SOURCES)
    return frozenset() if name == "behaviour" else frozenset({SOURCES[name]})


def source(batch: Trajectories, name: str) -> jax.Array:
    """Log-probabilities f32[N, L] of one of SOURCES; InputError where the batch does not have them."""
    if name not in SOURCES:
        raise unknown("log-probability source", name, SOURCES)
    value = getattr(batch, SOURCES[name])
    if value is None:
        raise InputError(f"the objective needs {SOURCES[name]}, which the batch does not have")
    return value


def log_ratio(logp: jax.Array, other: jax.Array, mask: jax.Array) -> jax.Array:
    """logp - other where the mask is true, 0 elsewhere, bounded by LARGEST so that its exponential stays finite."""
    return jnp.clip(jnp.where(mask, logp - other, 0.0), -LARGEST, LARGEST)


def token_ratio(against: str = "behaviour") -> Ratio:
    """rho_t = pi(a_t) / pi_against(a_t) for each token, f32[N, L]; 1 on tokens that do not count.

    against: "behaviour", "old" or "reference"; InputError for another name.
    """

    def ratio(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return jnp.exp(log_ratio(outputs.logp, source(batch, against), batch.loss_weights != 0))

    return Ratio(ratio, needed(against))
