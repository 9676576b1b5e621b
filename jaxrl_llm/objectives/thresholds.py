"""Penalties above a threshold, or on the distance to a target.

The KL threshold depends on the trend of the reward: its controller (PID, with a detector of training phases) is a
Transform that runs once per batch and writes controls, which the penalty reads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.log_ratios import log_ratio, needed, source, straight_through
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Metrics, Objective, State, Transform, control
from jaxrl_llm.objectives.averaging.averages import Average, Mean, as_average, averaged, token_mean
from jaxrl_llm.objectives.ratios import log_ratio_to

Number = jax.Array | float
PHASES = {"warm-up": 1.5, "climbing": 1.2, "converged": 1.0, "plateau": 0.8}  # factors of the threshold


class ControllerState(NamedTuple):
    """The state of `kl_threshold`; f32[] except for the counter and the history."""

    calls: jax.Array  # int32[]
    kl: jax.Array  # moving average
    reward: jax.Array  # moving average
    error: jax.Array
    integral: jax.Array
    history: jax.Array  # f32[2 window] of mean rewards, the newest last


def phase_factor(history: jax.Array, calls: jax.Array) -> jax.Array:
    """The factor f32[] of the first of PHASES that matches the two halves of the history, each of `window` rewards.

    Warm-up until the newer half is full; climbing if both are full and its mean is 0.01 above that of the older half;
    converged if its standard deviation is below 0.02 and its mean above 0.7; else a plateau.
    """
    window = history.shape[0] // 2
    before, last = history[:window], history[window:]
    rise = jnp.where(calls >= 2 * window, jnp.mean(last) - jnp.mean(before), 0.0)
    steady = (jnp.std(last) < 0.02) & (jnp.mean(last) > 0.7)
    factor = jnp.where(rise > 0.01, PHASES["climbing"], jnp.where(steady, PHASES["converged"], PHASES["plateau"]))
    return jnp.where(calls < window, PHASES["warm-up"], factor)


def next_threshold(
    state: ControllerState, kl: jax.Array, reward: jax.Array, base: Number, gains: tuple[Number, Number, Number]
) -> tuple[ControllerState, jax.Array]:
    """One step of the controller: threshold = clip((base + adj) phase, 0.1, 0.6), f32[], with

        kl <- 0.9 kl + 0.1 KL,    ema <- 0.95 ema + 0.05 r,    e = ema - ema_before - 0.001
        I <- clip(I + e, -1, 1),    adj = kp e + ki I + kd (e - e_before)

    In the first call ema = r, e = 0 and adj = 0. gains: kp, ki, kd.
    """
    first = state.calls == 0
    smooth = jnp.where(first, reward, 0.95 * state.reward + 0.05 * reward)
    error = jnp.where(first, 0.0, smooth - state.reward - 0.001)
    integral = jnp.clip(state.integral + error, -1.0, 1.0)
    kp, ki, kd = gains
    adjust = kp * error + ki * integral + kd * (error - state.error)
    history = jnp.concatenate([state.history[1:], reward[None]])
    after = ControllerState(state.calls + 1, 0.9 * state.kl + 0.1 * kl, smooth, error, integral, history)
    return after, jnp.clip((base + adjust) * phase_factor(history, after.calls), 0.1, 0.6)


def excess_penalty(
    kl: jax.Array, threshold: jax.Array, entropy: jax.Array, scale: Number, floor: Number
) -> tuple[jax.Array, jax.Array]:
    """scale (kl - threshold)^2 max(0.5, floor / (H + 0.1)) above the threshold, else 0; and its derivative. f32[]."""
    amplified = scale * jnp.maximum(0.5, floor / (entropy + 0.1))
    above = jnp.maximum(kl - threshold, 0.0)
    return amplified * above**2, 2 * amplified * above


@part
def kl_threshold(
    base: Number = 0.3,
    gains: tuple[Number, Number, Number] = (0.3, 0.01, 0.05),
    scale: Number = 0.1,
    entropy_floor: Number = 2.0,
    window: int = 50,
) -> Transform:
    """Write the controls "kl_threshold", "kl_penalty" and "kl_slope" (`next_threshold`, `excess_penalty`).

    KL is the mean over the batch's actions of log pi_behaviour - log pi_reference, r the mean score, and H the mean of
    `batch.entropy`. A batch without scores reuses the smoothed reward. gains: of the error, its integral and its
    derivative. window: number of batches that the phases are detected from.
    """
    check_number("window", window, least=1, whole=True)

    def apply(state: ControllerState, batch: Trajectories) -> tuple[State, Trajectories]:
        mask, scores = batch.action_mask, batch.scores
        tokens, rows = jnp.maximum(jnp.sum(mask), 1), jnp.sum(~jnp.isnan(scores))
        kl = jnp.sum(log_ratio(batch.behaviour_logp, source(batch, "reference"), mask)) / tokens
        entropy = jnp.sum(jnp.where(mask, batch.need("entropy"), 0.0)) / tokens
        reward = jnp.where(rows > 0, jnp.nansum(scores) / jnp.maximum(rows, 1), state.reward)
        state, threshold = next_threshold(state, kl, reward, base, gains)
        penalty, slope = excess_penalty(state.kl, threshold, entropy, scale, entropy_floor)
        return state, batch.with_controls(kl_threshold=threshold, kl_penalty=penalty, kl_slope=slope)

    def init() -> ControllerState:
        zero = jnp.float32(0)
        return ControllerState(jnp.int32(0), zero, zero, zero, zero, jnp.zeros(2 * window, jnp.float32))

    return Transform(init, apply, needed("reference"))


@part
def threshold_penalty(gradient: bool = True, average: Average | Mean | None = None) -> Objective:
    """The control "kl_penalty", with the gradient kl_slope * grad KL(pi || reference), estimated by the gradient of k2.

    gradient False: a constant, which changes the loss but not its gradient. average: default token_mean().
    Metrics: "kl" (mean log-ratio to the reference), "kl/threshold" and "kl/penalty".
    """
    mean = as_average(average)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        ratio = log_ratio_to(outputs, batch, "reference")
        gradient_only = straight_through(ratio, jnp.zeros_like) if gradient else jnp.zeros(ratio.shape)
        penalty, threshold = control(batch, "kl_penalty"), control(batch, "kl_threshold")
        loss = mean(penalty + control(batch, "kl_slope") * gradient_only, batch)
        statistics = {"kl": ratio, "kl/threshold": jnp.full(ratio.shape, threshold), "kl/penalty": penalty + 0 * ratio}
        return loss, {name: token_mean()(x, batch) for name, x in statistics.items()}

    return averaged(objective, mean, needed("reference"))


@part
def distance(penalty: Objective, target: Number, name: str = "above_target") -> Objective:
    """|penalty - target| of the batch's penalty, not a mean of per-token distances.

    The control `name` is the sign, -1, 0 or 1, of penalty - target over the whole batch at the current parameters.
    """

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        batch = penalty.refreshed(outputs, batch)
        return batch.with_controls(**{name: jnp.sign(penalty.function(outputs, batch)[0] - target)})

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        value, metrics = penalty.function(outputs, batch)
        # The token shares of the slices add up to 1, so their shares of the target add up to the target.
        share = token_mean()(jnp.ones(outputs.logp.shape), batch)
        return control(batch, name) * (value - share * target), metrics

    return Objective(objective, penalty.needs, refresh)
