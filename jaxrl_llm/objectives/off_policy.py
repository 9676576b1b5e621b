"""Importance correction for the mismatch between the old policy (the trainer) and the behaviour policy (the sampler).

x_t = logp_old - logp_behaviour. The weight of a token or its sequence multiplies the advantages, so it is not
differentiated, and the objective can use the ratio of the current to the old policy.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import NonNegativeNumber, Number, PositiveNumber
from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.log_ratios import LARGEST, k2, k3, log_ratio, source
from jaxrl_llm.core.parts import Array, Metrics, Objective, Transform, part, stateless, stateless_part
from jaxrl_llm.core.trajectory import SAMPLED, PolicyOutputs, Trajectories
from jaxrl_llm.objectives.averages import token_mean
from jaxrl_llm.utils.errors import require_choice

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "reject"]
Summary = Literal["token", "sum", "mean", "max"]
DIVERGENCES = {"k2": k2, "k3": k3}


def importance_weight(
    x: Array, mask: Array, level: Level = "token", mode: Mode = "truncate", low: Number = 0.0, high: Number = 2.0
) -> Array:
    """The weight of each token, f32[N, L]; 1 outside the mask. x f32[N, L]: log-ratios old / behaviour.

    level: rho = exp(x_t) of the "token", exp(sum_t x) of the "sequence", or exp(mean_t x), the "geometric" mean.
    mode: "truncate" min(rho, high), which ignores low; "mask" rho where low <= rho <= high, else 0 (IcePop,
    2510.18855); "reject" 1 where low <= rho <= high, else 0.

    >>> print(importance_weight(jnp.log(jnp.array([[1.5, 4.0]])), jnp.ones((1, 2), bool), high=2.0))
    [[1.5 2. ]]
    """
    require_choice("level", level, get_args(Level))
    require_choice("mode", mode, get_args(Mode))
    x = jnp.clip(jnp.where(mask, x, 0.0), -LARGEST, LARGEST)
    if level != "token":
        total = jnp.sum(x, axis=1, keepdims=True)
        length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
        x = jnp.broadcast_to(jnp.clip(total if level == "sequence" else total / length, -LARGEST, LARGEST), x.shape)
    rho = jnp.exp(x)
    inside = (rho >= low) & (rho <= high)
    weight = jnp.minimum(rho, high) if mode == "truncate" else jnp.where(inside, rho if mode == "mask" else 1.0, 0.0)
    return jnp.where(mask, weight, 1.0)


def divergence_weight(
    x: Array, mask: Array, bound: Number, estimator: Literal["k2", "k3"] = "k3", summary: Summary = "mean"
) -> Array:
    """1 where the divergence of old and behaviour policy is at most `bound`, else 0; f32[N, L], 1 outside the mask.

    estimator: "k2" x^2 / 2, or "k3" exp(x) - 1 - x; both non-negative. summary: compare each "token", or the "sum",
    "mean" or "max" over its sequence.
    """
    require_choice("estimator", estimator, DIVERGENCES)
    require_choice("summary", summary, get_args(Summary))
    d = DIVERGENCES[estimator](-jnp.clip(jnp.where(mask, x, 0.0), -LARGEST, LARGEST))
    if summary == "max":
        d = jnp.max(d, axis=1, keepdims=True, initial=0.0)
    elif summary != "token":
        length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
        d = jnp.sum(d, axis=1, keepdims=True) / (length if summary == "mean" else 1)
    return jnp.where(mask & (d > bound), 0.0, 1.0)


def mismatch(batch: Trajectories) -> Array:
    """Log-ratios of the old to the behaviour policy, f32[N, L]; 0 on tokens with weight 0."""
    return log_ratio(source(batch, "old"), source(batch, "behaviour"), batch.loss_weights != 0)


@part
def importance_correction(
    level: Level = "token",
    mode: Mode = "truncate",
    low: Number = 0.0,
    high: PositiveNumber = 2.0,
    *,
    normalise: Literal["none", "token", "sequence"] = "none",
    leave_count: bool = False,
) -> Transform:
    """Multiply the advantages by `importance_weight`. Needs old_logp; chain it after the transform that writes them.

    "truncate" at the token or sequence level is TIS, "mask" MIS (at the token level IcePop), "reject" at the geometric
    level Geo-RS. Several corrections can be chained. normalise: divide by the mean weight over all tokens ("token"), or
    by the mean over sequences of their mean weights ("sequence"). leave_count: exclude rejected tokens from the
    averages' denominators (verl); otherwise they count there with value 0 (TRL, AReaL).
    """

    def apply(batch: Trajectories) -> Trajectories:
        w = importance_weight(mismatch(batch), batch.loss_weights != 0, level, mode, low, high)
        if normalise != "none":
            w = w / _mean(w, batch.loss_weights, normalise)
        return _corrected(batch, w, leave_count)

    return stateless(apply, {"old_logp"})


@stateless_part({"old_logp"})
def divergence_rejection(
    batch: Trajectories,
    bound: NonNegativeNumber,
    estimator: Literal["k2", "k3"] = "k3",
    summary: Summary = "mean",
    *,
    leave_count: bool = True,
) -> Trajectories:
    """Multiply the advantages by `divergence_weight`; see `importance_correction`. bound >= 0. Needs old_logp."""
    w = divergence_weight(mismatch(batch), batch.loss_weights != 0, bound, estimator, summary)
    return _corrected(batch, w, leave_count)


@stateless_part({"old_logp"})
def stale_correction(
    batch: Trajectories, mode: Literal["truncate", "mask"] = "truncate", cap: PositiveNumber = 2.0
) -> Trajectories:
    """Weigh stale tokens, and take the policy before the update for the one that sampled. Needs old_logp.

    Advantages are multiplied by `importance_weight` of a token with this mode and the upper bound `cap`. After that the
    ratios of any method are to the policy before the update, so that its trust region lies around that, as in decoupled
    PPO. What tokens were sampled with stays in info["sampled_logp"]. Batches without advantages stay as they are.
    """
    if batch.advantages is None:
        return batch
    weight = importance_weight(mismatch(batch), batch.loss_weights != 0, "token", mode, high=cap)
    info = {**(batch.info or {}), SAMPLED: batch.behaviour_logp}
    return _corrected(batch, weight, False).replace(behaviour_logp=batch.need("old_logp"), info=info)


@part
def interpolated_proximal(
    objective: Objective, mode: Literal["truncate", "mask"] = "truncate", cap: PositiveNumber = 2.0
) -> Objective:
    """An objective whose behaviour policy is a proximal policy between the one that sampled and the current one.

    What `stale_correction` does, without a forward pass for the policy before the update (AReaL, 2505.24298). For a
    token that is d steps stale, info["staleness"], with log-probabilities theta now and b when it was drawn,

        proximal = sg(b + d / (d + 1) (theta - b)),  w = importance_weight(proximal - b, mode, cap)

    Advantages are multiplied by w, and ratios to the behaviour policy are to the proximal one: a token of the current
    weights has the objective as it is. Metric: "proximal/weight", the mean of w. Needs staleness.
    """
    expect("the objective around a proximal policy", objective, Objective)

    def moved(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Trajectories, Array]:
        counts, d = batch.loss_weights != 0, batch.need("staleness").astype(jnp.float32)
        x = log_ratio(jax.lax.stop_gradient(outputs.logp), batch.behaviour_logp, counts) * d / (d + 1)
        weight = importance_weight(x, counts, "token", mode, high=cap)
        batch = batch.replace(behaviour_logp=batch.behaviour_logp + x)
        return batch if batch.advantages is None else _corrected(batch, weight, False), weight

    def function(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        around, weight = moved(outputs, batch)
        loss, metrics = objective.function(outputs, around)
        return loss, metrics | {"proximal/weight": token_mean()(weight, batch)}

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        found = objective.refreshed(outputs, moved(outputs, batch)[0])
        return found.replace(behaviour_logp=batch.behaviour_logp, advantages=batch.advantages)

    return Objective(
        function, objective.needs | {"staleness"}, None if objective.refresh is None else refresh, objective.by_groups
    )


def _corrected(batch: Trajectories, weight: Array, leave_count: bool) -> Trajectories:
    advantages = jnp.where(batch.loss_weights != 0, batch.need("advantages"), 0.0) * weight
    if leave_count:
        batch = batch.replace(weights=batch.loss_weights * (weight != 0))
    return batch.replace(advantages=advantages)


def _mean(w: Array, counts: Array, over: str) -> Array:
    """Mean weight, at least 1e-8, to avoid division by 0 if everything is rejected."""
    if over == "token":
        total, number = jnp.sum(w * counts), jnp.sum(counts)
    else:
        length = jnp.sum(counts, axis=1)
        rows = jnp.sum(w * counts, axis=1) / jnp.where(length > 0, length, 1.0)
        total, number = jnp.sum(rows), jnp.sum(length > 0)
    return jnp.maximum(total / jnp.maximum(number, 1e-9), 1e-8)


@part
def scale_by_info(name: str) -> Transform:
    """Multiply the advantages by info[name], f32[N] or f32[N, L]; does nothing if the batch has no such entry."""

    def apply(batch: Trajectories) -> Trajectories:
        factor = (batch.info or {}).get(name)
        if factor is None:
            return batch
        factor = factor[:, None] if factor.ndim == 1 else factor
        return batch.replace(advantages=jnp.where(batch.action_mask, batch.need("advantages") * factor, 0.0))

    return stateless(apply, {name})


def compounded(factor: Array, x: Array, mask: Array, clip: Number = 0.2) -> Array:
    """M <- clip(M q), q = clip(exp(mean_t x)), both clipped to 1 +- clip, f32[N] (SeeUPO, 2602.06554).

    x f32[N, L]: log-ratios of the policy after an update to the policy before it; mask: the tokens that were updated.
    Their mean is clipped to +-10. Rows without such tokens keep their factor.
    """
    length = jnp.sum(mask, axis=1)
    mean = jnp.sum(jnp.where(mask, x, 0.0), axis=1) / jnp.maximum(length, 1)
    q = jnp.clip(jnp.exp(jnp.clip(mean, -10.0, 10.0)), 1 - clip, 1 + clip)
    return jnp.where(length > 0, jnp.clip(factor * q, 1 - clip, 1 + clip), factor)
