"""Anchor policies and their schedules: centred clips, mixtures of KL anchors, mirror-descent step sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.choices import Estimator, Source
from jaxrl_llm.core.coefficients import check_bounds, check_number
from jaxrl_llm.core.log_ratios import log_ratio, needed, source
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Metrics, Objective, Transform, counted
from jaxrl_llm.objectives.averaging.averages import Average, Mean
from jaxrl_llm.objectives.penalties import kl
from jaxrl_llm.objectives.surrogates import Surrogate, clip

Number = float | jax.Array


@part
def centred_clip(
    low: Number = 0.2, high: Number | None = None, of: Source = "old", over: Source = "behaviour"
) -> Surrogate:
    """min(rho A, clip(rho, c - low, c + high) A) with c = pi_of / pi_over of the token (2507.06892).

    rho is against `over`, the policy that drew the token; the trust region is centred on `of`. c = 1 where the two are
    equal. high defaults to low. The objective's `needs` must include the batch field of `of`.
    """
    low, high = check_bounds("clip", low, high, most=1)
    for name in (of, over):
        needed(name)  # InputError for another name

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        c = jnp.exp(log_ratio(source(batch, of), source(batch, over), batch.loss_weights != 0))
        value, metrics = clip(1 - c + low, c + high - 1)(ratio, outputs, batch)  # type: ignore[arg-type]
        return value, {**metrics, "clip/centre": c}

    return surrogate


def stepwise_decay(
    t: Number, hold: Number = 50, every: Number = 10, drop: Number = 0.1, least: Number = 0.5
) -> jax.Array:
    """max(1 - drop ceil(max(t - hold, 0) / every), least): 1 for `hold` iterations, then down in steps."""
    return jnp.maximum(1 - drop * jnp.ceil(jnp.maximum(t - hold, 0) / every), least)


@part
def mix_anchors(hold: Number = 50, every: Number = 10, drop: Number = 0.1, least: Number = 0.5) -> Transform:
    """Controls "reference_share", `stepwise_decay` of iteration t = 1, 2, ..., and "previous_share", the rest."""

    def apply(step: jax.Array, batch: Trajectories) -> Trajectories:
        share = stepwise_decay(step.astype(jnp.float32) + 1, hold, every, drop, least)
        return batch.with_controls(reference_share=share, previous_share=1 - share)

    return counted(apply)


@part
def mixed_anchor(estimator: Estimator = "k3", average: Average | Mean | None = None) -> Objective:
    """share KL(pi || reference) + (1 - share) KL(pi || previous), with the shares of `mix_anchors`."""
    near_reference = kl("reference", estimator, average, metric="kl/reference")
    near_previous = kl("previous", estimator, average, metric="kl/previous")
    return "reference_share" * near_reference + "previous_share" * near_previous


def linear_step(k: Number, total: Number | None, first: Number = 1.0) -> jax.Array:
    """first (1 - k / total) for iteration k = 0, 1, ..., at least first / total; `first` if total is None."""
    return jnp.asarray(first if total is None else first * (1 - jnp.minimum(k, total - 1) / total), jnp.float32)


@part
def mirror_step(total: Number | None, first: Number = 1.0) -> Transform:
    """Write the control "proximity", 1 / `linear_step`: the coefficient of the divergence from the last policy."""
    check_number("total_steps", total, least=1, or_none=True)
    check_number("step_size", first, above=0)
    return counted(lambda k, batch: batch.with_controls(proximity=1 / linear_step(k.astype(jnp.float32), total, first)))
