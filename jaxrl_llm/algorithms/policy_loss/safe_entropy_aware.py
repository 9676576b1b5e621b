from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import sequence_values, whiten_advantages
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Number, Ours, Positive, PositiveNumber
from jaxrl_llm.core.log_ratios import log_ratio, needed, source, straight_through_k2
from jaxrl_llm.core.parts import PolicyOutputs, State, Trajectories, Transform, batch_part, chain, part
from jaxrl_llm.core.transform import Metrics, Objective, control
from jaxrl_llm.objectives import Average, averaged, clipped_policy, entropy, token_mean, value_loss
from jaxrl_llm.objectives.averages import Mean, as_average
from jaxrl_llm.objectives.ratios import log_ratio_to
from jaxrl_llm.objectives.values import huber, last_action_mean


@method(paper="arXiv 2602.04651", test="test_actor_critic.py::test_safe_is_its_loop")
def safe_entropy_aware(
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    value_clip: Code[Positive | None] = 0.2,
    value_coefficient: Code[NonNegative] = 0.5,
    huber_width: Code[float] = 0.5,
    temperature: Code[Positive] = 0.3,
    entropy_coefficient: Code[NonNegative] = 0.01,
    threshold: Code[float] = 0.3,
    proportional: Code[float] = 0.3,
    integral: Code[float] = 0.01,
    derivative: Code[float] = 0.05,
    penalty_scale: Code[NonNegative] = 0.1,
    entropy_floor: Code[NonNegative] = 2.0,
    window: Code[int] = 50,
    penalty_gradient: Ours[bool] = True,
) -> Algorithm:
    """Stable Alignment Finetuning with Entropy-aware predictive control (SAFE).

    One value per row, at its last action, from two heads (the method needs "values:2"): their soft minimum

        V = -a (logsumexp(-v / a) - log 2),    a = temperature

    A = r - V, whitened over the rows, on all tokens of a row; the clipped loss of `ppo` (clip_low, clip_high), plus
    value_coefficient times the mean over rows of (h(V - r) + h(V_clipped - r)) / 2, with V_clipped within value_clip of
    V_old and h the Huber loss, x^2/2 up to |x| = huber_width and linear beyond; minus entropy_coefficient times the
    mean entropy; plus

        pen = penalty_scale (kl - thr)^2 max(0.5, entropy_floor / (H + 0.1))    where kl > thr, else 0

    with kl a moving average of log pi_old - log pi_ref, H the mean entropy at sampling, and thr = threshold adjusted by
    a PID controller on the growth of the reward (proportional, integral, derivative) and scaled by the phase of
    training that the last two windows of `window` batches show. The controller runs once
    per batch (released code: once per epoch over it).

    In the released code kl is a constant in pen, so that pen cannot move the policy. Here the value of the loss is the
    same, but with penalty_gradient its gradient is d pen / d kl times that of KL(pi || pi_ref), the evident intent;
    False is the released code. Values are read before the last action, as everywhere in this library, not after it:
    V knows the answer up to there, which is the paper's choice.
    """
    gains, combine = (proportional, integral, derivative), soft_minimum(temperature)
    transform = chain(
        kl_threshold(threshold, gains, penalty_scale, entropy_floor, window),
        sequence_values(combine, heads=2),
        whiten_advantages("sequences"),
    )
    values = value_loss(value_clip, last_action_mean(), error=huber(huber_width), of="mean", combine=combine, heads=2)
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * values + threshold_penalty(penalty_gradient)
    return Algorithm(transform, objective - entropy_coefficient * entropy())


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
    window: Count = 50,
) -> Transform:
    """Write the controls "kl_threshold", "kl_penalty" and "kl_slope" (`next_threshold`, `excess_penalty`).

    KL is the mean over the batch's actions of log pi_behaviour - log pi_reference, r the mean score, and H the mean of
    `batch.entropy`. A batch without scores reuses the smoothed reward. gains: of the error, its integral and its
    derivative. window: number of batches that the phases are detected from.
    """

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
        gradient_only = straight_through_k2(ratio, jnp.zeros_like) if gradient else jnp.zeros(ratio.shape)
        penalty, threshold = control(batch, "kl_penalty"), control(batch, "kl_threshold")
        loss = mean(penalty + control(batch, "kl_slope") * gradient_only, batch)
        statistics = {"kl": ratio, "kl/threshold": jnp.full(ratio.shape, threshold), "kl/penalty": penalty + 0 * ratio}
        return loss, {name: token_mean()(x, batch) for name, x in statistics.items()}

    return averaged(objective, mean, needed("reference"))


@batch_part
def soft_minimum(values: jax.Array, temperature: PositiveNumber = 0.3) -> jax.Array:
    """-a log mean_h exp(-v_h / a) over the heads [N, L, H]: the minimum as a -> 0, the mean as a -> inf.

    Values of a single head, [N, L], are returned unchanged.
    """
    if values.ndim == 2:
        return values
    return -temperature * (jax.nn.logsumexp(-values / temperature, axis=-1) - jnp.log(values.shape[-1]))
