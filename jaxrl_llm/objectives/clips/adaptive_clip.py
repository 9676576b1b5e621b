"""Clip bounds searched for each batch: relaxed until positive tokens contribute enough (BAPO, 2510.18927)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Metrics, Refresh, control
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Surrogate, clip
from jaxrl_llm.utils.errors import require_choice

Number = float | jax.Array
STATISTICS, ORDERS, CRITERIA = ("value", "gradient"), ("high_first", "low_first"), ("share", "ratio")
ROUNDING = 1e-5  # tolerance when bounds are compared in float32
MAX_STEPS = 10_000  # ends the search if a step size, which may be traced, is 0


def contributions(
    ratio: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    low: Number,
    high: Number,
    statistic: Literal["value", "gradient"] = "value",
) -> tuple[jax.Array, jax.Array]:
    """Contributions of the tokens with A >= 0 and with A < 0, f32[] each >= 0, for ratio bounds [low, high].

    "value": sums of w |A| min(rho, high) and of w |A| max(rho, low), the absolute surrogate. "gradient": sums of
    w |A| rho over the tokens that are not clipped.
    """
    require_choice("statistic", statistic, STATISTICS)
    good = advantages >= 0
    if statistic == "value":
        size = jnp.where(good, jnp.minimum(ratio, high), jnp.maximum(ratio, low))
    else:
        size = jnp.where(jnp.where(good, ratio <= high, ratio >= low), ratio, 0.0)
    size = weights * jnp.abs(advantages) * size
    return jnp.sum(jnp.where(good, size, 0.0)), jnp.sum(jnp.where(good, 0.0, size))


def search_bounds(
    ratio: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    target: Number,
    low: tuple[Number, Number, Number],
    high: tuple[Number, Number, Number],
    order: Literal["high_first", "low_first"] = "high_first",
    criterion: Literal["share", "ratio"] = "share",
    statistic: Literal["value", "gradient"] = "value",
) -> tuple[jax.Array, jax.Array]:
    """The first bounds, f32[] each, for which the tokens with A >= 0 reach the target; the last bounds if none do.

    low, high: (start, end, step) of each bound. order "high_first" raises the upper bound to its end, then the lower
    bound by one step at a time until it cannot be raised (the paper); "low_first" raises the lower bound to its end,
    then the upper one (the code). criterion, with P and N the `contributions` of A >= 0 and of A < 0:
    P / (P + N) >= target ("share") or P / N >= target ("ratio").
    """
    require_choice("order", order, ORDERS)
    require_choice("criterion", criterion, CRITERIA)
    (low_start, low_end, low_step), (high_start, high_end, high_step) = low, high

    Steps = tuple[jax.Array, jax.Array]  # number of steps taken; adding up step sizes in float32 would drift

    def bounds(n: Steps) -> tuple[jax.Array, jax.Array]:
        return jnp.minimum(low_start + n[0] * low_step, low_end), jnp.minimum(high_start + n[1] * high_step, high_end)

    def can_rise(n: Steps) -> tuple[jax.Array, jax.Array]:
        if order == "low_first":
            a, b = bounds(n)
            return a < low_end - ROUNDING, b < high_end - ROUNDING
        low_next, high_next = low_start + (n[0] + 1) * low_step, high_start + (n[1] + 1) * high_step
        return low_next <= low_end + ROUNDING, high_next <= high_end + ROUNDING

    def unfinished(n: Steps) -> jax.Array:
        good, bad = contributions(ratio, advantages, weights, *bounds(n), statistic)
        enough = good >= target * (bad + 1e-8 if criterion == "ratio" else good + bad)
        low_can, high_can = can_rise(n)
        going = low_can | high_can if order == "low_first" else low_can
        return ~enough & going & (n[0] + n[1] < MAX_STEPS)

    def relax(n: Steps) -> Steps:
        low_can, high_can = can_rise(n)
        raise_low = low_can if order == "low_first" else ~high_can
        return n[0] + raise_low, n[1] + ~raise_low

    return bounds(jax.lax.while_loop(unfinished, relax, (jnp.float32(0), jnp.float32(0))))


@part
def find_bounds(
    rho: Ratio,
    target: Number,
    low: tuple[Number, Number, Number],
    high: tuple[Number, Number, Number],
    order: Literal["high_first", "low_first"] = "high_first",
    criterion: Literal["share", "ratio"] = "share",
    statistic: Literal["value", "gradient"] = "value",
    weighted: bool = True,
) -> Refresh:
    """`search_bounds` over the whole batch; writes the controls "clip_low" and "clip_high" (bounds of the ratio).

    weighted: weight each token by its probability under the behaviour policy.
    """
    require_choice("order", order, ORDERS)
    require_choice("criterion", criterion, CRITERIA)
    require_choice("statistic", statistic, STATISTICS)

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        weights = batch.loss_weights
        A = jnp.where(weights != 0, batch.need("advantages"), 0.0)
        if weighted:
            weights = weights * jnp.exp(jnp.where(weights != 0, batch.behaviour_logp, 0.0))
        a, b = search_bounds(rho(outputs, batch), A, weights, target, low, high, order, criterion, statistic)
        return batch.with_controls(clip_low=a, clip_high=b)

    return refresh


@part
def controlled_clip(dual: float | None = None) -> Surrogate:
    """`clip` with the controls "clip_low" and "clip_high" as ratio bounds."""
    check_number("dual clip", dual, above=1, or_none=True)

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        low, high = control(batch, "clip_low"), control(batch, "clip_high")
        value, metrics = clip(1 - low, high - 1, dual)(ratio, outputs, batch)  # type: ignore[arg-type]
        bounds = {"clip/low_bound": jnp.full_like(ratio, low), "clip/high_bound": jnp.full_like(ratio, high)}
        return value, {**metrics, **bounds}

    return surrogate
