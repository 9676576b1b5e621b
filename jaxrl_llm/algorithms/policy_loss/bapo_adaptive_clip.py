from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import AboveOne, Fraction, Number, Paper, Positive
from jaxrl_llm.core.parts import Array, Metrics, PolicyOutputs, Trajectories, control, step_part, surrogate_part
from jaxrl_llm.objectives import Ratio, clip, policy_gradient, token_mean, token_ratio

Order = Literal["high_first", "low_first"]
Criterion = Literal["share", "ratio"]
Statistic = Literal["value", "gradient"]
Rise = tuple[Number, Number, Number]  # start, end and step of a bound


@method(paper="arXiv 2510.18927", test="test_trust_region.py::test_bapo_by_loop")
@presets(
    paper={"target": 0.4, "low_end": 0.9, "low_step": 0.02, "high_end": 3.0,
           "order": "high_first", "criterion": "share", "weighted": True, "dual_clip": None},
    code={"target": 1.0, "low_end": 0.8, "low_step": 0.05, "high_end": 2.0,
          "order": "low_first", "criterion": "ratio", "weighted": False, "dual_clip": 3.0},
)  # fmt: skip
def bapo_adaptive_clip(
    target: Paper[float] = 0.4,
    low_start: Paper[float] = 0.6,
    low_end: Paper[float] = 0.9,
    low_step: Paper[Fraction] = 0.02,
    high_start: Paper[float] = 1.2,
    high_end: Paper[float] = 3.0,
    high_step: Paper[Positive] = 0.05,
    order: Paper[Order] = "high_first",
    criterion: Paper[Criterion] = "share",
    statistic: Paper[Statistic] = "value",
    weighted: Paper[bool] = True,
    dual_clip: Paper[AboveOne | None] = None,
) -> Algorithm:
    """Balanced Policy Optimization with Adaptive Clipping (BAPO).

    loss = token mean of -min(rho A, clip(rho, c_low, c_high) A), with ratio bounds searched at each gradient step: from
    low_start and high_start up, in steps of low_step and high_step, to at most low_end and high_end, until the tokens
    with A > 0 contribute a share of at least `target` to sum q |min(rho A, clip(rho, c_low, c_high) A)|, q the token's
    probability under the behaviour policy. A is GRPO's.

    Where the paper (v1, section 5.1 and algorithm 1; the defaults) and the released code (preset "code") differ: order
    "high_first" raises c_high to its end, then c_low by one step; the code's "low_first" raises c_low to its end, then
    c_high. The code's criterion is "ratio", of positive to negative contributions, without q (weighted False), with
    target 1, bounds 0.6 to 0.8 and 1.2 to 2, and both steps 0.05; its README gives the paper's target as 0.5. Only the
    code bounds the loss of bad actions by dual_clip |A|, with dual_clip = 3 (None: no bound).

    With statistic "value", the formula of both, raising c_low increases the contribution of bad tokens, away from the
    target, so only c_high helps. "gradient" counts rho |A| of the tokens that are not clipped, which matches the
    paper's stated purpose.
    """
    rho = token_ratio()
    bounds = (low_start, low_end, low_step), (high_start, high_end, high_step)
    search = find_bounds(rho, target, *bounds, order, criterion, statistic, weighted)
    return Algorithm(group_relative(), policy_gradient(rho, controlled_clip(dual_clip), token_mean(), refresh=search))


ROUNDING = 1e-5  # tolerance when bounds are compared in float32
MAX_STEPS = 10_000  # ends the search if a step size, which may be traced, is 0


def contributions(
    ratio: Array, advantages: Array, weights: Array, low: Number, high: Number, statistic: Statistic = "value"
) -> tuple[Array, Array]:
    """Contributions of the tokens with A >= 0 and with A < 0, f32[] each >= 0, for ratio bounds [low, high].

    "value": sums of w |A| min(rho, high) and of w |A| max(rho, low), the absolute surrogate. "gradient": sums of
    w |A| rho over the tokens that are not clipped.
    """
    good = advantages >= 0
    if statistic == "value":
        size = jnp.where(good, jnp.minimum(ratio, high), jnp.maximum(ratio, low))
    else:
        size = jnp.where(jnp.where(good, ratio <= high, ratio >= low), ratio, 0.0)
    size = weights * jnp.abs(advantages) * size
    return jnp.sum(jnp.where(good, size, 0.0)), jnp.sum(jnp.where(good, 0.0, size))


def search_bounds(
    ratio: Array,
    advantages: Array,
    weights: Array,
    target: Number,
    low: Rise,
    high: Rise,
    order: Order = "high_first",
    criterion: Criterion = "share",
    statistic: Statistic = "value",
) -> tuple[Array, Array]:
    """The first bounds, f32[] each, for which the tokens with A >= 0 reach the target; the last bounds if none do.

    low, high: (start, end, step) of each bound. order "high_first" raises the upper bound to its end, then the lower
    bound by one step at a time until it cannot be raised (the paper); "low_first" raises the lower bound to its end,
    then the upper one (the code). criterion, with P and N the `contributions` of A >= 0 and of A < 0:
    P / (P + N) >= target ("share") or P / N >= target ("ratio").
    """
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


@step_part
def find_bounds(
    outputs: PolicyOutputs,
    batch: Trajectories,
    rho: Ratio,
    target: Number,
    low: Rise,
    high: Rise,
    order: Order = "high_first",
    criterion: Criterion = "share",
    statistic: Statistic = "value",
    weighted: bool = True,
) -> Trajectories:
    """`search_bounds` over the whole batch; writes the controls "clip_low" and "clip_high" (bounds of the ratio).

    weighted: weight each token by its probability under the behaviour policy.
    """
    weights = batch.loss_weights
    A = jnp.where(weights != 0, batch.need("advantages"), 0.0)
    if weighted:
        weights = weights * jnp.exp(jnp.where(weights != 0, batch.behaviour_logp, 0.0))
    a, b = search_bounds(rho(outputs, batch), A, weights, target, low, high, order, criterion, statistic)
    return batch.with_controls(clip_low=a, clip_high=b)


@surrogate_part
def controlled_clip(
    ratio: Array, outputs: PolicyOutputs, batch: Trajectories, dual: AboveOne | None = None
) -> tuple[Array, Metrics]:
    """`clip` with the controls "clip_low" and "clip_high" as ratio bounds."""
    low, high = control(batch, "clip_low"), control(batch, "clip_high")
    value, metrics = clip(1 - low, high - 1, dual)(ratio, outputs, batch)  # type: ignore[arg-type]
    bounds = {"clip/low_bound": jnp.full_like(ratio, low), "clip/high_bound": jnp.full_like(ratio, high)}
    return value, {**metrics, **bounds}
